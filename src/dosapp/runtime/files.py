"""Files that are whole or absent, JSON, and a lock per folder."""

import errno
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dosapp.errors import InputError


class CorruptRecordError(InputError):
    """A record whose bytes are not the ones that were written, or are gone."""


def write_bytes(path: Path, data: bytes) -> None:
    """Atomically: temporary file, flush to disk, rename."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        _flush_folder(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error


def ensure_dir(folder: Path) -> Path:
    """The folder, which is there now."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(folder, error) from error
    return folder


def storage_error(path: Path, error: OSError) -> InputError:
    if error.errno == errno.ENOSPC:
        return InputError(f"the disk of '{path}' is full; free some space, nothing was changed")
    return InputError(f"cannot write '{path}' ({error.strerror}); choose another place")


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def lock_folder(folder: Path, wait: bool = False) -> Iterator[None]:
    """One writer per folder; the lock is the system's, so it ends with the process."""
    if folder.exists() and not os.access(folder, os.W_OK):  # an old lock could be had all the same
        raise storage_error(folder, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    try:
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise storage_error(folder, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise InputError(
                f"'{folder}' is being written by another process; wait for it, or choose another"
            ) from error
        yield


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise InputError(f"'{path}' does not exist") from error
    except (ValueError, OSError) as error:
        raise CorruptRecordError(f"'{path}' cannot be read as JSON ({error})") from error
