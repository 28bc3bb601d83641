"""ImageArray on disk: files in folders, and members of tar archives, which are never unpacked."""

import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image
from torch import Tensor

from dosapp.errors import InputError

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".webp", ".tif", ".tiff"}
Prepare = Callable[[Image.Image], Tensor]


@dataclass(frozen=True)
class FileRef:
    """Where bytes are: a file, or a stretch of a tar archive."""

    path: Path
    member: str = ""
    start: int = 0
    size: int | None = None

    def __str__(self) -> str:
        return f"{self.path}:{self.member}" if self.member else str(self.path)

    @property
    def suffix(self) -> str:
        return Path(self.member or self.path).suffix.lower()

    def read(self) -> bytes:
        if not self.member:
            return self.path.read_bytes()
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.size)

    def name(self, root: Path) -> str:
        """The same on every machine that has the same folder."""
        return self.member or Path(os.path.relpath(self.path, root)).as_posix()


FileTree = Mapping[str, FileRef]  # relative name → where it is


def list_files(root: Path) -> FileTree:
    """Everything in a folder or a tar archive, by name; hidden files are not seen."""
    found = _in_folder(root) if root.is_dir() else _in_tar(root)
    return {n: found[n] for n in sorted(found) if not any(p.startswith(".") for p in n.split("/"))}


def strip_outer_folder(found: FileTree) -> FileTree:
    """Without a single folder around all pictures, unless that is a class itself."""
    pictures = [name for name, place in found.items() if place.suffix in SUFFIXES]
    tops = {name.partition("/")[0] for name in pictures}
    if len(tops) == 1 and any(name.count("/") > 1 for name in pictures):
        around = f"{tops.pop()}/"
        found = {n.removeprefix(around): p for n, p in found.items() if n.startswith(around)}
    return found


def _in_folder(root: Path) -> dict[str, FileRef]:
    found, seen = {}, set()
    for folder, inner, names in os.walk(root, followlinks=True):
        here = Path(folder)
        if here.resolve() in seen:  # a link that leads back
            inner.clear()
            continue
        seen.add(here.resolve())
        for name in names:
            found[(here / name).relative_to(root).as_posix()] = FileRef(here / name)
    return found


def _in_tar(path: Path) -> dict[str, FileRef]:
    found = {}
    try:
        with tarfile.open(path, "r:") as archive:  # uncompressed: members can be found again
            for entry in archive:
                name = entry.name.removeprefix("./").lstrip("/")
                # A hard link is a second name for an earlier member.
                file = archive.getmember(entry.linkname) if entry.islnk() else entry
                if file.isreg() and file.sparse is None:
                    found[name] = FileRef(path, name, file.offset_data, file.size)
    except (tarfile.TarError, OSError, KeyError) as error:
        raise InputError(f"'{path}' is not an uncompressed tar archive ({error})") from error
    return found


@dataclass(frozen=True)
class FileImages:
    """ImageArray by where they are."""

    places: tuple[FileRef, ...]
    root: Path
    prepare: Prepare
    _keys: dict[int, str] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.places)

    def decode(self, row: int) -> Tensor:
        return self.prepare(open_image(self.places[row]))

    def subset(self, rows: Sequence[int]) -> "FileImages":
        return FileImages(tuple(self.places[row] for row in rows), self.root, self.prepare)

    def identity(self) -> list[list[object]]:
        """Every picture's place, size and time of change."""
        seen: list[list[object]] = []
        for place in self.places:
            try:
                stat = place.path.stat()
            except OSError as error:
                raise InputError(f"image '{place}' cannot be read ({error.strerror})") from error
            where = [str(place.path.resolve()), place.start, place.size]
            seen.append([*where, stat.st_size, stat.st_mtime_ns])
        return seen

    def key(self, row: int) -> str:
        """Where it is and what is in it: the same name with other bytes is another picture."""
        if row not in self._keys:
            place = self.places[row]
            try:
                content = hashlib.sha256(place.read()).hexdigest()[:12]
            except OSError as error:
                raise InputError(f"image '{place}' cannot be read ({error.strerror})") from error
            self._keys[row] = f"{place.name(self.root)}:{content}"
        return self._keys[row]


def open_image(place: FileRef) -> Image.Image:
    return decode_image(lambda: Image.open(io.BytesIO(place.read())), place)


def decode_image(image: Callable[[], Image.Image], place: object) -> Image.Image:
    """Decoded, or one sentence about where it is."""
    try:
        with image() as found:
            return found.convert("RGB")
    except FileNotFoundError as error:
        raise InputError(f"image '{place}' does not exist") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = str(error).partition(" <")[0]  # Pillow names the buffer; we name the file
        raise InputError(
            f"image '{place}' cannot be read ({reason}); replace or remove it"
        ) from error
