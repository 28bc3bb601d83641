"""Images on disk: files in folders, and members of tar archives, which are never unpacked."""

import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from dosapp.data.preprocess import to_rgb
from dosapp.errors import InputError

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".webp", ".tif", ".tiff"}


@dataclass(frozen=True)
class FileRef:
    """A file, or a member of an uncompressed tar archive."""

    path: Path
    member: str = ""
    offset: int = 0
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
            file.seek(self.offset)
            return file.read(self.size)

    def relative_name(self, root: Path) -> str:
        """The same on every machine that has the same folder."""
        return self.member or Path(os.path.relpath(self.path, root)).as_posix()


FileTree = Mapping[str, FileRef]  # relative name → file


def list_files(root: Path) -> FileTree:
    """All files of a folder or a tar archive by relative name, except hidden ones."""
    found = _list_folder(root) if root.is_dir() else _list_tar(root)
    return {n: found[n] for n in sorted(found) if not any(p.startswith(".") for p in n.split("/"))}


def strip_outer_folder(files: FileTree) -> FileTree:
    """Remove a single folder around all images, unless it is a class itself."""
    images = [name for name, file in files.items() if file.suffix in SUFFIXES]
    tops = {name.partition("/")[0] for name in images}
    if len(tops) == 1 and any(name.count("/") > 1 for name in images):
        outer = f"{tops.pop()}/"
        files = {n.removeprefix(outer): f for n, f in files.items() if n.startswith(outer)}
    return files


def _list_folder(root: Path) -> dict[str, FileRef]:
    found, visited = {}, set()
    for folder, subfolders, names in os.walk(root, followlinks=True):
        here = Path(folder)
        if here.resolve() in visited:  # a link that leads back
            subfolders.clear()
            continue
        visited.add(here.resolve())
        for name in names:
            found[(here / name).relative_to(root).as_posix()] = FileRef(here / name)
    return found


def _list_tar(path: Path) -> dict[str, FileRef]:
    found = {}
    try:
        with tarfile.open(path, "r:") as archive:  # uncompressed: members have an offset
            for entry in archive:
                name = entry.name.removeprefix("./").lstrip("/")
                # A hard link is a second name of an earlier member.
                file = archive.getmember(entry.linkname) if entry.islnk() else entry
                if file.isreg() and file.sparse is None:
                    found[name] = FileRef(path, name, file.offset_data, file.size)
    except (tarfile.TarError, OSError, KeyError) as error:
        raise InputError(f"'{path}' is not an uncompressed tar archive ({error})") from error
    return found


@dataclass(frozen=True)
class FileImages:
    """Images in files."""

    files: tuple[FileRef, ...]
    root: Path
    _keys: dict[int, str] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.files)

    def open(self, row: int) -> Image.Image:
        return open_image(self.files[row])

    def subset(self, rows: Sequence[int]) -> "FileImages":
        return FileImages(tuple(self.files[row] for row in rows), self.root)

    def identity(self) -> list[list[object]]:
        """Path, size and modification time of every image."""
        described: list[list[object]] = []
        for file in self.files:
            try:
                stat = file.path.stat()
            except OSError as error:
                raise _unreadable(file, error) from error
            where = [str(file.path.resolve()), file.offset, file.size]
            described.append([*where, stat.st_size, stat.st_mtime_ns])
        return described

    def key(self, row: int) -> str:
        """Relative name and content: the same name with other bytes is another image."""
        if row not in self._keys:
            file = self.files[row]
            try:
                content = hashlib.sha256(file.read()).hexdigest()[:12]
            except OSError as error:
                raise _unreadable(file, error) from error
            self._keys[row] = f"{file.relative_name(self.root)}:{content}"
        return self._keys[row]


def _unreadable(file: FileRef, error: OSError) -> InputError:
    return InputError(f"image '{file}' cannot be read ({error.strerror})")


def open_image(file: FileRef) -> Image.Image:
    """Decode an image file as RGB."""
    return decode_image(lambda: Image.open(io.BytesIO(file.read())), file)


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
