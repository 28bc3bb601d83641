"""A folder that appears complete and flushed to disk, or not at all."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dosapp.errors import BusyError, InputError
from dosapp.runtime.files import (
    ensure_dir,
    flush_folder,
    list_names,
    lock_folder,
    storage_error,
)

PREFIX = ".dosapp-new-"  # of folders that are being filled


@contextmanager
def new_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Fill a folder beside the target, which it becomes at the end of the context.

    What killed processes left beside the target is removed first.

    Args:
        target: A folder that is empty or does not exist.
        replace: Replace a folder that is not empty, when the new one is complete.

    Yields:
        An empty folder to write to.

    Raises:
        InputError: The target is not empty.
        StorageError: It cannot be written.
    """
    is_folder = not target.is_symlink() and (target.is_dir() or not target.exists())
    if not is_folder or (list_names(target) and not replace):
        raise InputError(f"'{target}' is not empty; choose a new folder")
    ensure_dir(target.parent)
    _remove_abandoned(target.parent)
    scratch = ensure_dir(target.parent / f"{PREFIX}{secrets.token_hex(8)}")
    try:
        with lock_folder(scratch):
            filled = ensure_dir(scratch / "new")
            yield filled
            flush_tree(filled)
            if target.exists():
                os.replace(target, scratch / "old") if replace else os.rmdir(target)
            os.replace(filled, target)
            flush_folder(target.parent)
    except OSError as error:
        raise storage_error(target, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove folders that no process fills any more: their lock is free."""
    for name in list_names(folder):
        if name.startswith(PREFIX):
            with suppress(BusyError), lock_folder(folder / name):
                shutil.rmtree(folder / name, ignore_errors=True)


def flush_tree(folder: Path) -> None:
    """Flush every file and folder below a folder, and itself, to disk."""
    for path, _, names in os.walk(folder, topdown=False):
        for name in names:
            descriptor = os.open(Path(path) / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        flush_folder(Path(path))
