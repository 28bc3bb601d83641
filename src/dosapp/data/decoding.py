"""Image files → RGB: EXIF orientation, 16 bits, transparency; one sentence for a broken file."""

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageOps

from dosapp.errors import InputError


def decode_image(open_encoded: Callable[[], Image.Image], where: object) -> Image.Image:
    """Decode an image as RGB, or raise an `InputError` that says where it is."""
    try:
        with open_encoded() as image:
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
    try:
        if image.getexif():
            image = ImageOps.exif_transpose(image)
    except Exception:  # Pillow raises anything on a damaged tag; the pixels are fine
        pass
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # 16 bits; Pillow's own conversion clips at 255
        values = np.asarray(image).astype(np.float64)
        if image.mode != "I" or values.max(initial=0) > 255:
            values = values / 257
        return Image.fromarray(values.round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")
