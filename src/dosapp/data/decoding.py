"""Image files → RGB: EXIF orientation, 16 bits, transparency; one sentence for a broken file."""

import io
from collections.abc import Callable
from typing import cast

import numpy as np
from PIL import Image, UnidentifiedImageError

from dosapp.errors import InputError

# All that is ever opened, whatever a file is named: for others Pillow starts programs (EPS).
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
STRIP_PIXELS = 250_000  # converted at once
ORIENTATION = 274  # a tag of EXIF
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SWAPPING = {TURNS[n] for n in (5, 6, 7, 8)}  # width and height
REVERSING = {TURNS[n] for n in (3, 4, 6, 7)}  # the first row becomes the last row or column


def open_encoded(data: bytes) -> Image.Image:
    """Open an encoded image, if it is in one of the formats that are read.

    Args:
        data: The contents of the file.

    Returns:
        The image, not yet decoded.

    Raises:
        ValueError: It is in another format.
    """
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ValueError(f"it is not in the format {', '.join(FORMATS)}") from error


def decode_image(read: Callable[[], bytes], where: object) -> Image.Image:
    """Decode an image as RGB.

    Args:
        read: Reads the contents of its file.
        where: The file, for messages.

    Returns:
        The image.

    Raises:
        InputError: It cannot be read.
    """
    try:
        with open_encoded(read()) as image:
            image.load()  # before the file is closed
            return to_rgb(image)
    except FileNotFoundError as error:
        raise InputError(f"image '{where}' does not exist") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = str(error).partition(" <")[0]  # Pillow names its buffer
        raise InputError(
            f"image '{where}' cannot be read ({reason}); replace or remove it"
        ) from error


def to_rgb(image: Image.Image) -> Image.Image:
    """An image as a viewer shows it: upright, eight bits, on white where it is transparent.

    Example:
        >>> to_rgb(Image.new("RGBA", (1, 1), (255, 0, 0, 0))).getpixel((0, 0))
        (255, 255, 255)
    """
    image = to_eight_bits(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def to_eight_bits(image: Image.Image) -> Image.Image:
    """As `to_rgb`, but a grey image stays grey, in a quarter of the memory.

    Args:
        image: Any image, also one whose file was not read yet.

    Returns:
        An image of mode L or RGB; the same one if nothing is to be changed.
    """
    return image if is_plain(image) else convert(image)


def band_names(image: Image.Image) -> str:
    """The names of the bands that `to_eight_bits(image)` has."""
    return "L" if _is_grey(image) else "RGB"


def is_plain(image: Image.Image) -> bool:
    """Load an image, and say whether it is upright, of eight bits and not transparent."""
    image.load()  # a TIFF is upright then, and has no tag any more
    is_eight_bits = image.mode == "RGB" or (image.mode == "L" and _is_grey(image))
    return is_eight_bits and _find_turn(image) is None


def _is_grey(image: Image.Image) -> bool:
    is_wide = image.mode.startswith("I")
    return is_wide or (image.mode == "L" and not image.has_transparency_data)


def convert(image: Image.Image, band: str = "") -> Image.Image:
    """Convert an image as `to_eight_bits` does, or one band of it in a quarter of the memory.

    A strip at a time: intermediate copies of a large image would take several times its memory.

    Args:
        image: An image that is loaded.
        band: One of `band_names`, or all.

    Returns:
        A new image.
    """
    (width, height), turn = image.size, _find_turn(image)
    mode, scale = band_names(image), _choose_scale(image)
    rows = max(1, STRIP_PIXELS // max(1, width))
    result = Image.new("L" if band else mode, (height, width) if turn in SWAPPING else image.size)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        strip = image.crop((0, top, width, bottom))
        if image.mode.startswith("I"):
            strip = _scale(strip, scale)
        elif image.mode != mode:
            strip = _flatten(strip)
        if band and mode == "RGB":
            strip = strip.getchannel(band)
        start = height - bottom if turn in REVERSING else top
        if turn is not None:
            strip = strip.transpose(turn)
        result.paste(strip, (start, 0) if turn in SWAPPING else (0, start))
    return result


def _find_turn(image: Image.Image) -> Image.Transpose | None:
    """How a loaded image is to be turned, by its metadata.

    `ImageOps.exif_transpose` also encodes all other tags again, which may take seconds.
    """
    try:
        return TURNS.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # Pillow raises anything on a damaged tag; the pixels are fine
        return None


def _choose_scale(image: Image.Image) -> int:
    """What values of more than eight bits are divided by."""
    if image.mode != "I":
        return 257
    _, highest = cast(tuple[int, int], image.getextrema())
    return 257 if highest > 255 else 1


def _scale(image: Image.Image, scale: int) -> Image.Image:
    """16 bits to 8; Pillow's own conversion clips at 255."""
    values = np.asarray(image) / scale
    return Image.fromarray(values.round().clip(0, 255).astype(np.uint8))


def _flatten(image: Image.Image) -> Image.Image:
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")
