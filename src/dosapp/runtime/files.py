"""Atomic files, JSON, and a lock per folder.

A file is written under a temporary name in its folder, flushed to disk and renamed: a reader sees
the old content or the new, never a part.
"""

import errno
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dosapp.errors import BusyError, CorruptRecordError, InputError, StorageError


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
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = create_file(temporary, private)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _flush_folder(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error


def create_file(path: Path, private: bool = False) -> int:
    """Create a new file and return its descriptor; the umask applies unless it is private."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666)


def ensure_dir(folder: Path) -> Path:
    """Create a folder and its parents if they are missing, and return it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(folder, error) from error
    return folder


def storage_error(path: Path, error: OSError) -> StorageError:
    """Turn a failed write into one sentence."""
    if error.errno == errno.ENOSPC:
        return StorageError(f"the disk of '{path}' is full; free some space, nothing was changed")
    return StorageError(f"cannot write '{path}' ({error.strerror}); choose another place")


def _flush_folder(folder: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock_folder(folder: Path, wait: bool = False) -> Iterator[None]:
    """Hold the write lock of a folder. It is the system's, so it ends with the process.

    Args:
        folder: The folder to lock; a file `.lock` is created in it.
        wait: Wait for another holder instead of raising.

    Raises:
        BusyError: Another process holds the lock.
        StorageError: The folder cannot be written.
    """
    if folder.exists() and not os.access(folder, os.W_OK):
        # The lock file of an earlier owner may still be writable.
        raise storage_error(folder, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    try:
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise storage_error(folder, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise BusyError(
                f"'{folder}' is being written by another process; wait for it, or choose another"
            ) from error
        yield


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically."""
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise InputError(f"'{path}' does not exist") from error
    except (ValueError, OSError) as error:
        raise CorruptRecordError(f"'{path}' cannot be read as JSON ({error})") from error
