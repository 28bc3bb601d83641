"""What people send, as pictures: decoded in memory, within limits, never on a disk."""

import base64
import binascii
import io
import unicodedata
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from dosapp.data.base import check_class_names
from dosapp.data.files import SUFFIXES, list_files, strip_outer_folder
from dosapp.errors import InputError, TooLargeError
from dosapp.learner.learner import Learner
from dosapp.service.settings import ServiceSettings

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
NAME = 200  # letters in a class name
INFLATED = 20  # times the limit of a body that an archive may hold


M = TypeVar("M")


class Uploads:
    def __init__(self, learner: Learner, settings: ServiceSettings) -> None:
        origin = learner.origin  # stays, whatever becomes of this learner
        self.size, self.prepare = origin.image_size, origin.preprocess
        self.settings = settings

    # One picture

    def picture(self, data: bytes, name: str = "the picture") -> Tensor:
        """`uint8 [3, H, W]`. The size is known before a single pixel is decoded."""
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            if image.width * image.height > self.settings.max_pixels:
                raise TooLargeError(
                    f"{name} has {image.width} × {image.height} pixels; at most "
                    f"{self.settings.max_pixels:,} are taken"
                )
            if min(image.size) < 1 or max(image.size) > 100 * min(image.size):
                raise InputError(f"{name} is {image.width} × {image.height}; give a usual shape")
            return self.prepare(image)
        except InputError:
            raise
        except UnidentifiedImageError as error:
            raise InputError(
                f"{name} is not a picture; give one of {', '.join(FORMATS)}"
            ) from error
        except (Image.DecompressionBombError, MemoryError) as error:
            raise TooLargeError(f"{name} is too large to be decoded") from error
        except Exception as error:  # decoders throw anything at damaged bytes
            raise InputError(f"{name} cannot be read as a picture ({_first(error)})") from error

    def pictures(self, files: Sequence[tuple[str, bytes]]) -> Tensor:
        """`uint8 [n, 3, H, W]`."""
        if not files:
            raise InputError("there is no picture in the request; send at least one")
        self._check_count(len(files), self.settings.max_images)
        return torch.stack([self.picture(data, f"'{name}'") for name, data in files])

    def encoded(self, texts: Sequence[str]) -> Tensor:
        """The same from base64, with or without a `data:` beginning."""
        self._check_count(len(texts), self.settings.max_images)
        files = []
        for n, text in enumerate(texts):
            body = text.partition(",")[2] if text.startswith("data:") else text
            try:
                files.append((f"images[{n}]", base64.b64decode(body, validate=True)))
            except (binascii.Error, ValueError) as error:
                raise InputError(f"images[{n}] is not base64 ({error})") from error
        return self.pictures(files)

    def tensor(self, data: bytes, shape: str, kind: str) -> Tensor:
        """Raw numbers in C order: uint8, or float32 in [0, 1], already at the backbone's size."""
        kinds: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "float32": np.dtype("<f4")}
        if kind not in kinds:
            raise InputError(f"dtype is '{kind[:40]}'; give uint8 or float32")
        try:
            sizes = [int(part) for part in shape.split(",")]
        except ValueError as error:
            raise InputError(f"shape is '{shape[:40]}'; write it as 1,3,H,W") from error
        wanted = [3, self.size, self.size]
        if len(sizes) != 4 or sizes[1:] != wanted or sizes[0] < 1:
            raise InputError(f"shape is {sizes[:8]}; give [n, 3, {self.size}, {self.size}]")
        self._check_count(sizes[0], self.settings.max_images)
        if len(data) != int(np.prod(sizes)) * kinds[kind].itemsize:
            raise InputError(f"the body has {len(data)} bytes, which is not {sizes} of {kind}")
        values = np.frombuffer(data, dtype=kinds[kind]).reshape(sizes)
        if kind == "uint8":
            return torch.from_numpy(values.copy())
        if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
            raise InputError("the tensor has values outside 0 to 1, or none at all; give [0, 1]")
        return torch.from_numpy((values * 255).round().astype(np.uint8))

    # Lessons: pictures by class name

    def archive(self, data: bytes) -> dict[str, Tensor]:
        """A zip of class folders. Nothing is unpacked; names are only read, never followed."""
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                members = [m for m in archive.infolist() if _is_picture(m)]
                self._check_count(len(members), self.settings.max_session_images)
                total = sum(m.file_size for m in members)
                if total > INFLATED * self.settings.max_body:
                    raise TooLargeError(f"the archive holds {total:,} bytes; that is too much")
                named = _by_class({m.filename: m for m in members})
                return self._classes(
                    (name, [(m.filename, self._member(archive, m)) for m in found])
                    for name, found in named.items()
                )
        except InputError:
            raise
        except Exception as error:  # so do archives
            raise InputError(f"the archive cannot be read as a zip ({_first(error)})") from error

    def _member(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
        """No more than a body may have, whatever the archive says about its size."""
        with archive.open(member) as file:
            data = file.read(self.settings.max_body + 1)
        if len(data) > self.settings.max_body:
            raise TooLargeError(f"'{member.filename[:80]}' in the archive is too large")
        return data

    def folder(self, name: str) -> dict[str, Tensor]:
        """Class folders in a folder below the one set aside for lessons."""
        root = self.settings.session_folder
        if root is None:
            raise InputError(
                "this service has no folder for lessons; start it with --lessons FOLDER"
            )
        try:
            place = (root.resolve() / name).resolve()
            inside = place.is_relative_to(root.resolve()) and place.is_dir()
        except (ValueError, OSError) as error:  # a NUL, a name that is too long
            raise InputError(f"there is no folder '{name[:80]}' among the lessons") from error
        if not inside:
            raise InputError(f"there is no folder '{name[:80]}' among the lessons")
        found = strip_outer_folder(list_files(place))
        pictures = {n: p for n, p in found.items() if p.suffix in SUFFIXES and "/" in n}
        self._check_count(len(pictures), self.settings.max_session_images)
        if any(not p.path.resolve().is_relative_to(root.resolve()) for p in pictures.values()):
            raise InputError(f"'{name[:80]}' has links that lead out of the lessons")
        return self._classes(
            (label, [(str(p.path.name), p.read()) for p in places])
            for label, places in _by_class(pictures).items()
        )

    def lesson(self, name: str, files: Sequence[tuple[str, bytes]]) -> dict[str, Tensor]:
        self._check_count(len(files), self.settings.max_session_images)
        return self._classes([(name, files)])

    def _classes(
        self, named: Iterable[tuple[str, Sequence[tuple[str, bytes]]]]
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for raw, files in named:
            name = class_name(raw)
            if name in found:
                raise InputError(f"the lesson names the class '{name}' twice; names must differ")
            if not files:
                raise InputError(f"class '{name}' has no pictures; give at least one")
            found[name] = torch.stack([self.picture(data, f"'{n[-80:]}'") for n, data in files])
        if not found:
            raise InputError("the lesson has no pictures in class folders; put each class in one")
        return found

    def _check_count(self, count: int, most: int) -> None:
        if count > most:
            raise TooLargeError(f"the request has {count} pictures; at most {most} are taken")


def class_name(raw: str) -> str:
    """As it is said: no underscores or control characters, of a usual length; and however its
    accents were typed, names that look alike are one class."""
    name = unicodedata.normalize("NFC", " ".join(raw.replace("_", " ").split()))
    check_class_names([name], "the lesson")
    if len(name) > NAME or not name.isprintable():
        raise InputError(f"the class name '{name[:40]}…' is too long or cannot be printed")
    return name


def _is_picture(member: zipfile.ZipInfo) -> bool:
    parts = member.filename.replace("\\", "/").split("/")
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in parts)  # and ..
    return (
        not member.is_dir()
        and not hidden
        and not member.filename.startswith(("/", "\\"))
        and len(parts) > 1
        and Path(member.filename).suffix.lower() in SUFFIXES
    )


def _by_class(members: Mapping[str, M]) -> dict[str, list[M]]:
    """By the folder a picture lies in."""
    found: dict[str, list[M]] = {}
    for name, member in sorted(members.items()):
        found.setdefault(name.replace("\\", "/").split("/")[-2], []).append(member)
    return found


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
