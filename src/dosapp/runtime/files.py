"""Atomic files, JSON, and a lock per folder.

A file is written under a temporary name in its folder, flushed to disk and renamed: a reader sees
the old content or the new, never a part. Symbolic links inside a learner's folder are not followed.
Every access to a learner's folder is a call of `os` in this module: tests let each of them fail.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dosapp.errors import BusyError, CorruptRecordError, InputError, StorageError

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}")  # names of files that are being written
CHUNK = 1 << 24  # bytes of one read or write
TURN_WAIT = 10.0  # seconds
TURN_FILE = ".tokens.lock"

# Reading


def read_bytes(path: Path) -> bytes:
    """Read a file; the errors are those of `read_start`."""
    return read_start(path)[0]


def read_start(path: Path, limit: int | None = None) -> tuple[bytes, int]:
    """Read the first bytes of a file.

    Args:
        path: A regular file; a symbolic link is refused.
        limit: Read at most so many bytes; all if not given.

    Returns:
        The bytes, and the size of the whole file.

    Raises:
        FileNotFoundError: It does not exist.
        InputError: It is a link, or no file at all.
        StorageError: It cannot be read now, which says nothing about its content.
    """
    try:
        # A named pipe would block without O_NONBLOCK; for a file it means nothing.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InputError(f"'{path}' is not a file; remove it, or choose another folder")
            data, left = bytearray(), status.st_size if limit is None else limit
            while part := os.read(descriptor, min(CHUNK, left - len(data))):
                data += part
            return bytes(data), status.st_size
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise read_error(path, error) from error


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Differs if a file was replaced; None if it does not exist."""
    try:
        found = _lstat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def is_private(path: Path) -> bool:
    """Whether only its owner may read a file."""
    return not _lstat(path).st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def is_link(path: Path) -> bool:
    """Whether a path is a symbolic link; False if nothing is there."""
    try:
        return stat.S_ISLNK(_lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _lstat(path: Path) -> os.stat_result:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise read_error(path, error) from error


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        InputError: It does not exist.
        CorruptRecordError: It is not JSON.
        StorageError: It cannot be read now.
    """
    try:
        return json.loads(read_bytes(path))
    except FileNotFoundError as error:
        raise InputError(f"'{path}' does not exist") from error
    except (ValueError, RecursionError) as error:
        raise CorruptRecordError(f"'{path}' cannot be read as JSON ({error})") from error


def list_names(folder: Path) -> list[str]:
    """The names in a folder in order; none if the folder does not exist."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise read_error(folder, error) from error


def refuse_links(folder: Path) -> None:
    """Raise an `InputError` if a folder has a symbolic link in it, at any depth.

    Through a link, a folder that comes from elsewhere would read and overwrite files outside it.
    """
    for name in list_names(folder):
        path = folder / name
        try:
            mode = _lstat(path).st_mode
        except FileNotFoundError:  # a temporary file
            continue
        if stat.S_ISLNK(mode):
            raise link_error(path)
        if stat.S_ISDIR(mode):
            refuse_links(path)


# Writing


def write_bytes(path: Path, data: bytes, private: bool = False) -> None:
    """Write a file atomically; its folder is created if it is missing.

    Args:
        path: Where to write.
        data: The whole content.
        private: Readable by its owner only; otherwise the umask decides.

    Raises:
        StorageError: The disk is full or the folder cannot be written.
    """
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    try:
        ensure_dir(path.parent)
        try:
            _write_descriptor(create_file(temporary, private), data)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):  # else the next writer removes it
                os.unlink(temporary)
            raise
        flush_folder(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error


def create_file(path: Path, private: bool = False) -> int:
    """Create a new file and return its descriptor; the umask applies unless it is private."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically."""
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def append_bytes(path: Path, data: bytes) -> None:
    """Append to a file, which is created if it is missing, and flush it to disk."""
    flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        _write_descriptor(os.open(path, flags, 0o666), data)
    except OSError as error:
        raise storage_error(path, error) from error


def _write_descriptor(descriptor: int, data: bytes) -> None:
    """Write all bytes, flush them to disk and close the descriptor."""
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest[:CHUNK]) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_file(path: Path) -> None:
    """Delete a file, if it is there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise storage_error(path, error) from error


def rename_file(path: Path, new: Path) -> None:
    """Rename a file within its folder."""
    try:
        os.replace(path, new)
        flush_folder(new.parent)
    except OSError as error:
        raise storage_error(path, error) from error


def ensure_dir(folder: Path) -> Path:
    """Create a folder and its parents if they are missing, and return it."""
    try:
        missing = [p for p in (folder, *folder.parents) if not p.exists()]
        os.makedirs(folder, exist_ok=True)
        for created in missing:
            flush_folder(created.parent)
    except OSError as error:
        raise storage_error(folder, error) from error
    return folder


def flush_folder(folder: Path) -> None:
    """Make new names, renames and deletions in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporary_files(folder: Path) -> None:
    """Delete what killed writers left half-written; the lock of the folder must be held."""
    for name in list_names(folder):
        if TEMPORARY.fullmatch(name) and not (folder / name).is_dir():
            remove_file(folder / name)


# Errors


def storage_error(path: Path, error: OSError) -> StorageError | InputError:
    """Turn a failed write into one sentence."""
    if error.errno == errno.ELOOP:
        return link_error(path)
    if error.errno == errno.ENOSPC:
        return StorageError(f"the disk of '{path}' is full; free some space, nothing was changed")
    return StorageError(f"cannot write '{path}' ({error.strerror}); choose another place")


def read_error(path: Path, error: OSError) -> StorageError | InputError:
    """Turn a failed read into one sentence. The content may be intact, so it is not corrupt."""
    if error.errno == errno.ELOOP:
        return link_error(path)
    if error.errno == errno.EACCES:
        return StorageError(f"'{path}' cannot be read by this user; ask its owner for access")
    return StorageError(
        f"'{path}' cannot be read now ({error.strerror}); nothing was changed, try again"
    )


def link_error(path: Path) -> InputError:
    """The error for a symbolic link where a file of a learner should be."""
    return InputError(
        f"'{path}' is a symbolic link, which dosapp does not follow; replace it by the file itself"
    )


# The lock


@dataclass(frozen=True)
class FolderLock:
    """The write lock of a folder, while it is held."""

    path: Path
    descriptor: int

    def is_in_place(self) -> bool:
        """Whether the lock file is still the one that is locked."""
        held = os.fstat(self.descriptor)
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)

    def check(self) -> None:
        """Raise a `StorageError` if the lock file was replaced: another process may write then."""
        try:
            is_in_place = self.is_in_place()
        except OSError as error:
            raise read_error(self.path, error) from error
        if not is_in_place:
            raise StorageError(
                f"'{self.path}' was deleted or replaced, so another process may write this folder; "
                "nothing was changed, restart this process"
            )


@contextmanager
def lock_folder(folder: Path, wait: bool = False) -> Iterator[FolderLock]:
    """Hold the write lock of a folder. It is the system's, so it ends with the process.

    Args:
        folder: The folder to lock; a file `.lock` is created in it.
        wait: Wait for another holder instead of raising.

    Yields:
        The lock, which a writer checks before each commit.

    Raises:
        BusyError: Another process holds the lock.
        InputError: The lock file is a link.
        StorageError: The folder cannot be written.
    """
    if folder.exists() and not os.access(folder, os.W_OK):
        # The lock file of an earlier owner may still be writable.
        raise storage_error(folder, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    lock = _acquire_lock(folder, wait)
    try:
        yield lock
    finally:
        os.close(lock.descriptor)


@contextmanager
def take_turn(folder: Path) -> Iterator[None]:
    """Wait until no other process changes a small file of a folder; its write lock may be held.

    A file of the owner's is locked: the folder itself can be locked by all who may read it. Where
    the system cannot do that, there is no turn to wait for.

    Raises:
        BusyError: Another process has had its turn for seconds.
    """
    descriptor, deadline = -1, time.monotonic() + TURN_WAIT
    try:
        with suppress(OSError):
            flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(folder / TURN_FILE, flags, 0o600)
        while descriptor >= 0:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise BusyError(
                        f"another process has kept '{folder / TURN_FILE}' locked for "
                        f"{TURN_WAIT:g} seconds; end it"
                    ) from error
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _acquire_lock(folder: Path, wait: bool) -> FolderLock:
    path, flags = folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        try:
            lock = FolderLock(
                path, os.open(path, flags, 0o600)
            )  # who cannot open it cannot lock it
        except OSError as error:
            is_link = error.errno == errno.ELOOP
            raise storage_error(path if is_link else folder, error) from error
        is_held = False
        try:
            fcntl.flock(lock.descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            is_held = lock.is_in_place()  # otherwise it was replaced before it was locked
        except BlockingIOError as error:
            raise BusyError(
                f"'{folder}' is being written by another process; wait for it, stop it, or choose "
                "another folder"
            ) from error
        except OSError as error:
            raise storage_error(folder, error) from error
        finally:
            if not is_held:
                os.close(lock.descriptor)
        if is_held:
            return lock
