"""Request bodies → images: decoded in memory, within limits, never written to a disk."""

import base64
import binascii
import io
import re
import threading
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from dosapp.data.base import check_class_names
from dosapp.data.decoding import FORMATS
from dosapp.data.files import SUFFIXES, list_files, strip_outer_folder
from dosapp.data.preprocess import Preprocess, to_bytes
from dosapp.errors import InputError, TooLargeError
from dosapp.service.image_headers import CountedFile, bound_webp_tables, strip_metadata
from dosapp.service.settings import ServiceSettings

MAX_NAME_LENGTH = 200  # characters of a class name
MAX_INFLATION = 4  # an archive may hold so many times the bytes of a body
ZIP_ENTRY = b"PK\x01\x02"  # begins each entry of an archive's directory

LARGE = 1_000_000  # pixels of an image that is decoded apart from others
MAX_SCANS = 100  # of a JPEG; usual ones have about ten, and each passes over all pixels
SCAN = re.compile(rb"\xff\xda\x00[\x08\x0a\x0c\x0e][\x01-\x04]")  # cannot be part of other data
WEIGHTS = {"WEBP": 3, "TIFF": 2}  # of a pixel: decoding takes so much more memory than of others
COMPRESSION, TILE_WIDTH, TILE_LENGTH = 259, 322, 323  # tags of a TIFF
# None, LZW, deflate (two numbers), packed bits: others hold images of a size of their own.
COMPRESSIONS = (1, 5, 8, 32946, 32773)
BYTES_PER_PIXEL = 5  # that decoding takes; what some files need beside counts as pixels, too
UNKNOWN = "unknown"  # the label of a prediction below the threshold, so no class has this name

M = TypeVar("M")


class PixelRoom:
    """Bounds the pixels that are being decoded at the same time.

    Args:
        size: Pixels in all; a larger image gets all of it.
    """

    def __init__(self, size: int) -> None:
        self.size, self._held, self._condition = size, 0, threading.Condition()

    @contextmanager
    def hold(self, pixels: int) -> Iterator[None]:
        """Wait for room, and give it back at the end of the block."""
        pixels = min(pixels, self.size)
        with self._condition:
            self._condition.wait_for(lambda: self._held + pixels <= self.size)
            self._held += pixels
        try:
            yield
        finally:
            with self._condition:
                self._held -= pixels
                self._condition.notify_all()


@dataclass(frozen=True)
class CheckedImage:
    """An image file whose head was checked."""

    name: str  # for messages
    data: bytes
    pixels: int  # as limits count them


class UploadDecoder:
    """Decodes images of predict requests, and images by class name of sessions."""

    def __init__(self, preprocess: Preprocess, settings: ServiceSettings) -> None:
        self.preprocess, self.settings = preprocess, settings
        self._room = PixelRoom(settings.max_pixels)

    # Images

    def check_image(self, data: bytes, name: str = "the image") -> CheckedImage:
        """Check the size and kind of one image file by its head; no pixels are decoded.

        Raises:
            InputError: The bytes are not an image in a known format.
            TooLargeError: The image has too many pixels.
        """
        with _reading(name):
            used = strip_metadata(data)
            if size := read_webp_size(used):
                width, height = size
                tables = bound_webp_tables(used, width, height)
                # Twice: so large a block seldom fits where the last one was.
                pixels = WEIGHTS["WEBP"] * width * height + 2 * tables // BYTES_PER_PIXEL
            else:
                with Image.open(CountedFile(used), formats=FORMATS) as image:
                    (width, height), pixels = image.size, count_pixels(image, used)
                    _check_effort(image, used, name)
            if pixels > self.settings.max_pixels:
                advice = "" if pixels == width * height else "; save it as PNG or baseline JPEG"
                raise TooLargeError(
                    f"{name} has {width} × {height} pixels and counts as {pixels:,}; at most "
                    f"{self.settings.max_pixels:,} are accepted{advice}"
                )
            if min(width, height) < 1 or max(width, height) > 100 * min(width, height):
                raise InputError(f"{name} is {width} × {height}; give a usual shape")
        return CheckedImage(name, data, pixels)

    def decode_checked(self, image: CheckedImage) -> Tensor:
        """Decode an image to `uint8 [3, H, W]`.

        Large ones wait until there is room: together they have at most as many pixels as one
        image may have, which bounds memory. They are opened only now, because Pillow allocates the
        pixels of a WebP when it opens it, and keeps them when it closes it.
        """
        room = self._room.hold(image.pixels) if image.pixels > LARGE else nullcontext()
        with (
            _reading(image.name),
            room,
            Image.open(CountedFile(strip_metadata(image.data)), formats=FORMATS) as file,
        ):
            return self.preprocess(file)

    def decode_image(self, data: bytes, name: str = "the image") -> Tensor:
        """Decode one image file to `uint8 [3, H, W]`."""
        return self.decode_checked(self.check_image(data, name))

    def check_images(self, files: Sequence[tuple[str, bytes]]) -> list[CheckedImage]:
        """Check number, sizes and kinds of the files of a request, given as (name, bytes).

        Raises:
            InputError: There is no image, or one cannot be read.
            TooLargeError: There are too many images, or too many pixels in all.
        """
        if not files:
            raise InputError("there is no image in the request; send at least one")
        self._check_count(len(files), self.settings.max_images)
        checked = [self.check_image(data, f"'{name}'") for name, data in files]
        total, most = sum(image.pixels for image in checked), self.settings
        if total > max(most.max_request_pixels, most.max_pixels):
            raise TooLargeError(
                f"the images of the request have {total:,} pixels in all; at most "
                f"{most.max_request_pixels:,} are accepted, so send fewer at once"
            )
        return checked

    def check_base64(self, texts: Sequence[str]) -> list[CheckedImage]:
        """Check images given as base64 texts or `data:` URLs."""
        self._check_count(len(texts), self.settings.max_images)
        files = []
        for n, text in enumerate(texts):
            body = text.partition(",")[2] if text.startswith("data:") else text
            try:
                files.append((f"images[{n}]", base64.b64decode(body, validate=True)))
            except (binascii.Error, ValueError) as error:
                raise InputError(f"images[{n}] is not base64 ({error})") from error
        return self.check_images(files)

    def decode_part(self, images: Sequence[CheckedImage]) -> Tensor:
        """Decode images to `uint8 [n, 3, H, W]`."""
        return torch.stack([self.decode_checked(image) for image in images])

    def decode_tensor(self, data: bytes, shape: str, dtype: str) -> Tensor:
        """Decode a raw tensor in C order, at the backbone's size: uint8, or float32 in [0, 1]."""
        dtypes: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "float32": np.dtype("<f4")}
        if dtype not in dtypes:
            raise InputError(f"dtype is '{dtype[:40]}'; give uint8 or float32")
        try:
            sizes = [int(part) for part in shape.split(",")]
        except ValueError as error:
            raise InputError(f"shape is '{shape[:40]}'; write it as 1,3,H,W") from error
        size = self.preprocess.image_size
        if len(sizes) != 4 or sizes[1:] != [3, size, size] or sizes[0] < 1:
            raise InputError(f"shape is {sizes[:8]}; give [n, 3, {size}, {size}]")
        self._check_count(sizes[0], self.settings.max_images)
        if len(data) != int(np.prod(sizes)) * dtypes[dtype].itemsize:
            raise InputError(f"the body has {len(data)} bytes, which is not {sizes} of {dtype}")
        values = torch.from_numpy(np.frombuffer(data, dtype=dtypes[dtype]).reshape(sizes).copy())
        if dtype == "float32" and not (values.min() >= 0 and values.max() <= 1):  # NaN fails both
            raise InputError("the tensor has values outside 0 to 1; give floats in [0, 1]")
        return to_bytes(values)

    # Sessions: images by class name

    def read_zip(self, data: bytes) -> dict[str, Tensor]:
        """Decode a zip of class folders. Member names are only read, never used as paths."""
        most = self.settings.max_session_images
        if data.count(ZIP_ENTRY) > 2 * most + 1000:  # before each becomes an object
            raise TooLargeError(f"the archive has too many files; at most {most:,} are accepted")
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                members = [
                    (name, m) for m in archive.infolist() if _is_image(name := _decode_name(m))
                ]
                self._check_count(len(members), most)
                total = sum(m.file_size for _, m in members)
                if total > MAX_INFLATION * self.settings.max_body:
                    raise TooLargeError(f"the archive holds {total:,} bytes; that is too much")
                twice = [
                    name for name, count in Counter(n for n, _ in members).items() if count > 1
                ]
                if twice:
                    raise InputError(f"the archive has '{twice[0][-80:]}' twice; names must differ")
                return self._decode_classes(
                    (label, ((name, self._read_member(archive, m)) for name, m in group))
                    for label, group in _group_by_folder(members).items()
                )
        except InputError:
            raise
        except Exception as error:  # zipfile raises anything on damaged bytes
            reason = _first_line(error)
            raise InputError(f"the archive cannot be read as a zip ({reason})") from error

    def _read_member(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
        """Read a member up to the limit of a body, whatever size the archive declares for it."""
        with archive.open(member) as file:
            data = file.read(self.settings.max_body + 1)
        if len(data) > self.settings.max_body:
            raise TooLargeError(f"'{member.filename[:80]}' in the archive is too large")
        return data

    def read_folder(self, name: str) -> dict[str, Tensor]:
        """Decode the class folders of a folder below the setting `session_folder`."""
        root = self.settings.session_folder
        if root is None:
            raise InputError(
                "this service has no folder of sessions; start it with --session-folder FOLDER"
            )
        try:
            folder = (root.resolve() / name).resolve()
            is_inside = folder.is_relative_to(root.resolve()) and folder.is_dir()
        except (ValueError, OSError):  # a NUL, a name that is too long
            is_inside = False
        if not is_inside:
            raise InputError(f"there is no folder '{name[:80]}' in the folder of sessions")
        files = strip_outer_folder(list_files(folder))
        images = {n: f for n, f in files.items() if f.suffix in SUFFIXES and "/" in n}
        self._check_count(len(images), self.settings.max_session_images)
        if any(not f.path.resolve().is_relative_to(root.resolve()) for f in images.values()):
            raise InputError(f"'{name[:80]}' has links that lead out of the folder of sessions")
        for file in images.values():  # reading a pipe would wait for ever
            if not file.path.is_file():
                raise InputError(f"'{file.path.name[:80]}' in '{name[:80]}' is not a file")
            if file.path.stat().st_size > self.settings.max_body:
                raise TooLargeError(f"'{file.path.name[:80]}' in '{name[:80]}' is too large")
        return self._decode_classes(
            (label, ((str(f.path.name), f.read()) for _, f in group))
            for label, group in _group_by_folder(images.items()).items()
        )

    def read_class(self, name: str, files: Sequence[tuple[str, bytes]]) -> dict[str, Tensor]:
        """Decode files, given as (name, bytes), as the images of one class."""
        self._check_count(len(files), self.settings.max_session_images)
        return self._decode_classes([(name, files)])

    def _decode_classes(
        self, classes: Iterable[tuple[str, Iterable[tuple[str, bytes]]]]
    ) -> dict[str, Tensor]:
        images: dict[str, Tensor] = {}
        for raw_name, files in classes:
            name = normalize_class_name(raw_name)
            if name in images:
                raise InputError(f"the session names the class '{name}' twice; names must differ")
            decoded = [self.decode_image(data, f"'{title[-80:]}'") for title, data in files]
            if not decoded:
                raise InputError(f"class '{name}' has no images; give at least one")
            images[name] = torch.stack(decoded)
        if not images:
            raise InputError("the session has no images in class folders; put each class in one")
        return images

    def _check_count(self, count: int, limit: int) -> None:
        if count > limit:
            raise TooLargeError(f"the request has {count} images; at most {limit} are accepted")


def normalize_class_name(name: str) -> str:
    """Normalize whitespace, underscores and Unicode, so that equal-looking names are one class.

    Raises:
        InputError: The name is empty, too long or cannot be printed.

    Example:
        >>> normalize_class_name(" red_fox ")
        'red fox'
    """
    name = unicodedata.normalize("NFC", " ".join(name.replace("_", " ").split()))
    check_class_names([name], "the session")
    if len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise InputError(f"the class name '{name[:40]}…' is too long or cannot be printed")
    if name.casefold() == UNKNOWN:
        raise InputError(f"the class name '{name}' means that no class was found; give another")
    return name


def count_pixels(image: Image.Image, data: bytes = b"") -> int:
    """Width times height times the format's weight; tiles of a TIFF are decoded as a whole.

    Args:
        image: An image that is not decoded yet.
        data: Its file.
    """
    tags: Mapping[int, int] = getattr(image, "tag_v2", {})
    width, height = int(tags.get(TILE_WIDTH, 0)), int(tags.get(TILE_LENGTH, 0))
    tiled = 0
    if width > 0 and height > 0:
        tiled = -(-image.width // width) * width * -(-image.height // height) * height
    pixels = max(image.width * image.height, tiled) * WEIGHTS.get(image.format or "", 1)
    return pixels + _count_coefficients(image, data) // BYTES_PER_PIXEL


def _count_coefficients(image: Image.Image, data: bytes) -> int:
    """Bytes of all coefficients of a JPEG, if several scans give them: they are kept until then."""
    layers: Sequence[tuple[int, int, int, int]] = getattr(image, "layer", ())
    sampling = [(h, v) for _, h, v, _ in layers]
    is_whole = all(scan[0][-1] >= len(sampling) for scan in SCAN.finditer(data))
    if image.format != "JPEG" or (is_whole and "progressive" not in image.info):
        return 0
    largest = max(h for h, _ in sampling) * max(v for _, v in sampling)
    return 2 * image.width * image.height * sum(h * v for h, v in sampling) // max(1, largest)


def read_webp_size(data: bytes) -> tuple[int, int] | None:
    """Read width and height from the head of a WebP; None if it is another format.

    Raises:
        InputError: It is a WebP without a size.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    kind, head = data[12:16], data[20:30].ljust(10, b"\0")
    if kind == b"VP8X":
        return 1 + int.from_bytes(head[4:7], "little"), 1 + int.from_bytes(head[7:10], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(head[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        sides = (int.from_bytes(head[n : n + 2], "little") & 0x3FFF for n in (6, 8))
        return next(sides), next(sides)
    raise InputError("a WebP has no size; save it again")


def _check_effort(image: Image.Image, data: bytes, name: str) -> None:
    """Refuse files that take far longer than others of their size in pixels.

    Raises:
        InputError: It has too many scans, tiles that overlap, or an encoding that Pillow decodes
            in Python.
    """
    if image.format == "JPEG" and sum(1 for _ in SCAN.finditer(data)) > MAX_SCANS:
        raise InputError(f"{name} is a JPEG of more than {MAX_SCANS} scans; save it again")
    compression = getattr(image, "tag_v2", {}).get(COMPRESSION, 1)
    if image.format == "TIFF" and compression not in COMPRESSIONS:
        raise InputError(f"{name} is a TIFF with compression {compression}; save it as PNG or JPEG")
    areas = ((x1 - x0) * (y1 - y0) for _, (x0, y0, x1, y1), *_ in getattr(image, "tile", ()))
    if sum(areas) > len(image.getbands()) * image.width * image.height:
        raise InputError(f"{name} has parts that lie on each other; save it as PNG or JPEG")
    if any(tile[0] in Image.DECODERS for tile in getattr(image, "tile", ())):
        raise InputError(f"{name} is a rare kind of {image.format}; save it as PNG or JPEG")


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn everything that Pillow raises on bad bytes into one sentence."""
    try:
        yield
    except InputError:
        raise
    except UnidentifiedImageError as error:
        raise InputError(f"{name} is not an image; give one of {', '.join(FORMATS)}") from error
    except (Image.DecompressionBombError, MemoryError) as error:
        raise TooLargeError(f"{name} is too large to be decoded") from error
    except Exception as error:  # Pillow's decoders raise anything on damaged bytes
        reason = _first_line(error)
        raise InputError(f"{name} cannot be read as an image ({reason})") from error


def _decode_name(member: zipfile.ZipInfo) -> str:
    """The name of a member. Many programs write UTF-8 without the flag that says so."""
    if member.flag_bits & 0x800:
        return member.filename
    try:
        return member.filename.encode("cp437").decode("utf-8")
    except UnicodeError:
        return member.filename


def _is_image(name: str) -> bool:
    parts = name.replace("\\", "/").split("/")
    is_hidden = any(part.startswith(".") or part == "__MACOSX" for part in parts)  # also ..
    return (
        not name.endswith("/")
        and not is_hidden
        and not name.startswith(("/", "\\"))
        and len(parts) > 1
        and Path(name).suffix.lower() in SUFFIXES
    )


def _group_by_folder(members: Iterable[tuple[str, M]]) -> dict[str, list[tuple[str, M]]]:
    """Group files by the innermost folder of their name, in order of names."""
    groups: dict[str, list[tuple[str, M]]] = {}
    for name, member in sorted(members, key=lambda pair: pair[0]):
        folder = name.replace("\\", "/").split("/")[-2]
        groups.setdefault(folder, []).append((name, member))
    return groups


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
