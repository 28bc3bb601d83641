"""Images on disk: files in folders, members of tar and zip archives, which are never unpacked."""

import hashlib
import os
import tarfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from PIL import Image

from dosapp.data.decoding import decode_image
from dosapp.errors import InputError
from dosapp.runtime.plural import plural

ARCHIVES = (".tar", ".zip")
MAX_MEMBER = 200_000_000  # bytes of a file in a zip, unpacked
# Of cameras and phones: Pillow alone does not read most of them.
UNREAD_SUFFIXES = {".heic", ".heif", ".avif", ".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw"}
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".webp", ".tif", ".tiff"}


@dataclass(frozen=True)
class FileRef:
    """A file, or a member of an uncompressed tar archive or of a zip."""

    path: Path
    member: str = ""
    offset: int = 0  # of a tar's member in bytes; of a zip's in its list of members
    size: int | None = None

    def __str__(self) -> str:
        return f"{self.path}:{self.member}" if self.member else str(self.path)

    @property
    def suffix(self) -> str:
        return Path(self.member or self.path).suffix.lower()

    def read(self) -> bytes:
        if not self.member:
            return self.path.read_bytes()
        if self.path.suffix.lower() == ".zip":
            return self._read_zip()
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)

    def _read_zip(self) -> bytes:
        """Read a member, whatever size the archive declares for it."""
        archive = _open_zip(self.path, self.path.stat().st_mtime_ns)
        try:
            with archive.open(archive.infolist()[self.offset]) as file:
                data = file.read(MAX_MEMBER + 1)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
            raise InputError(f"'{self}' cannot be read ({error})") from error  # or is encrypted
        if len(data) > MAX_MEMBER:
            raise InputError(f"'{self}' has more than {MAX_MEMBER:,} bytes; unpack the archive")
        return data

    def relative_name(self, root: Path) -> str:
        """The same on every machine that has the same folder."""
        return self.member or Path(os.path.relpath(self.path, root)).as_posix()


FileTree = Mapping[str, FileRef]  # relative name → file


def list_files(root: Path) -> FileTree:
    """All files of a folder, a tar or a zip archive by relative name, except hidden ones."""
    if root.is_dir():
        found = _list_folder(root)
    else:
        found = _list_zip(root) if root.suffix.lower() == ".zip" else _list_tar(root)
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
    for folder, subfolders, names in os.walk(root, onerror=_refuse_folder, followlinks=True):
        here = Path(folder)
        if here.resolve() in visited:  # a link that leads back
            subfolders.clear()
            continue
        visited.add(here.resolve())
        for name in names:
            found[(here / name).relative_to(root).as_posix()] = FileRef(here / name)
    return found


def _refuse_folder(error: OSError) -> None:
    raise InputError(
        f"folder '{error.filename}' cannot be read ({error.strerror}); change its permissions, or "
        "move it elsewhere"
    ) from error


def find_empty_folders(root: Path) -> list[str]:
    """The innermost folders below a folder that hold no images; hidden ones are not meant.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> (root / "train" / "fox").mkdir(parents=True)
        >>> find_empty_folders(root)
        ['train/fox']
    """
    empty = []
    for folder, subfolders, names in os.walk(root):
        name = Path(folder).relative_to(root).as_posix()
        is_hidden = any(part.startswith(".") for part in name.split("/"))  # also the root itself
        has_images = any(Path(file).suffix.lower() in SUFFIXES for file in names)
        if not (subfolders or is_hidden or has_images):
            empty.append(name)
    return sorted(empty)


def list_folder_images(folder: Path) -> list[Path]:
    """The image files directly in a folder, except hidden ones.

    Raises:
        InputError: There are none.
    """
    found = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.name[0] != ".")
    if not found:
        raise InputError(f"'{folder}' has no images in it; give a folder of image files")
    return found


def warn_of_unread_images(root: Path) -> None:
    """Count the images below a folder in formats that are not read, in a warning."""
    names = (name for _, _, names in os.walk(root) for name in names if name[0] != ".")
    counts = Counter(Path(name).suffix.lower() for name in names)
    if unread := sorted(UNREAD_SUFFIXES & counts.keys()):
        listed = ", ".join(plural(counts[suffix], f"{suffix} file") for suffix in unread)
        warnings.warn(
            f"left out of '{root}': {listed}; convert these images to JPEG or PNG", stacklevel=3
        )


@lru_cache(maxsize=8)
def _open_zip(path: Path, modified: int) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)


def _list_zip(path: Path) -> dict[str, FileRef]:
    """Member names are only read, never used as paths."""
    try:
        members = _open_zip(path, path.stat().st_mtime_ns).infolist()
    except (zipfile.BadZipFile, OSError) as error:
        raise InputError(f"'{path}' is not a zip archive ({error})") from error
    found = {}
    for index, member in enumerate(members):
        name = decode_zip_name(member).replace("\\", "/").lstrip("/")
        if not member.is_dir() and "__MACOSX" not in name.split("/"):
            found[name] = FileRef(path, name, index, member.file_size)
    return found


def decode_zip_name(member: zipfile.ZipInfo) -> str:
    """The name of a member: Linux writes UTF-8 without the flag that says so."""
    if member.flag_bits & 0x800:
        return member.filename
    try:
        return member.filename.encode("cp437").decode()
    except UnicodeError:
        return member.filename


class CheckedTar(tarfile.TarFile):
    """A tar archive whose members follow each other up to its end.

    `tarfile` goes back by a negative size, for ever, and takes a malformed header for the end.
    """

    def next(self) -> tarfile.TarInfo | None:
        """Return the next member, None at the end.

        Raises:
            ReadError: The member has a negative size, or a malformed header.
        """
        entry = super().next()
        if entry is not None and entry.size < 0:
            raise tarfile.ReadError(f"'{entry.name}' has a negative size")
        if entry is None and self.fileobj is not None:
            self.fileobj.seek(self.offset)
            if self.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise tarfile.ReadError(f"the header at byte {self.offset:,} is malformed")
        return entry


def _list_tar(path: Path) -> dict[str, FileRef]:
    found = {}
    try:
        with CheckedTar.open(path, "r:") as archive:  # uncompressed: members have an offset
            for entry in archive:
                name = entry.name.removeprefix("./").lstrip("/")
                # A hard link is a second name of an earlier member.
                file = archive.getmember(entry.linkname) if entry.islnk() else entry
                if file.isreg() and file.sparse is None:
                    found[name] = FileRef(path, name, file.offset_data, file.size)
    except (tarfile.TarError, OSError, LookupError, ValueError, RecursionError) as error:
        raise InputError(
            f"'{path}' is not an uncompressed tar archive ({error}); if it is compressed, unpack "
            "it and give the folder"
        ) from error
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
    return decode_image(file.read, file)
