"""Decoded images in one memory-mapped file, so that no image is decoded or hashed twice.

A cache file is named after what decides its content: which images, and how they are preprocessed.
It is written under a temporary name, by one process while others wait, and renamed when it is
complete. The least recently used files are deleted when the folder exceeds `DOSAPP_CACHE_GB`.
"""

import hashlib
import json
import os
import secrets
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dosapp.data.base import Dataset, ImageArray, ImageSource, Rows, Split
from dosapp.data.preprocess import Preprocess
from dosapp.errors import InputError
from dosapp.runtime.files import (
    create_file,
    ensure_dir,
    lock_folder,
    read_json,
    storage_error,
    write_bytes,
    write_json,
)
from dosapp.runtime.plural import plural

FORMAT = 2  # 2: images are upright, and on white where they are transparent
CHUNK = 256  # images decoded before they are written
DEFAULT_GB = 40.0  # the paper's five datasets at 224 px take about 21


def cache_folder() -> Path:
    """The folder of decoded images, below `DOSAPP_CACHE` or the user's cache.

    A user's cache that cannot be written is replaced by a temporary folder, with a warning.
    """
    root = _cache_root()
    old = root / "pictures"  # its name before 0.3
    return old if old.is_dir() else root / "images"


def _cache_root() -> Path:
    if chosen := os.environ.get("DOSAPP_CACHE"):
        return Path(chosen)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    existing = next(path for path in (home / "dosapp", home, *home.parents) if os.path.exists(path))
    is_writable = existing.is_dir() and os.access(existing, os.W_OK)
    return home / "dosapp" if is_writable else Path(_temporary_cache(home).name)


@cache
def _temporary_cache(home: Path) -> TemporaryDirectory[str]:
    """A folder that is deleted when the process ends; one for all datasets."""
    warnings.warn(
        f"'{home}' cannot be written, so decoded images are kept in a temporary folder and decoded "
        "again next time; set DOSAPP_CACHE to a folder that can be written",
        stacklevel=2,
    )
    return TemporaryDirectory(prefix="dosapp-")


def cache_dataset(
    dataset: Dataset[ImageSource], preprocess: Preprocess, skip_bad: bool = False
) -> Dataset[ImageArray]:
    """Put the images of a dataset behind a cache of decoded images.

    Args:
        dataset: Images as they are stored.
        preprocess: Resize and crop of the backbone.
        skip_bad: Leave unreadable images out, with a warning, instead of raising.

    Returns:
        The dataset; an image is decoded when one of its split is first read.
    """
    train, test = (_cache_split(s, preprocess, skip_bad) for s in (dataset.train, dataset.test))
    return Dataset(dataset.name, dataset.classes, train, test, dataset.prompts)


def _cache_split(
    split: Split[ImageSource], preprocess: Preprocess, skip_bad: bool
) -> Split[ImageArray]:
    cached = CachedImages(split.images, preprocess, cache_folder())
    if not skip_bad or not (unreadable := cached.find_unreadable()):
        return Split(cached, split.labels)
    first = next(iter(unreadable.values()))
    warnings.warn(f"{plural(len(unreadable), 'image')} skipped; the first: {first}", stacklevel=4)
    good = [row for row in range(len(cached)) if str(row) not in unreadable]
    readable = replace(cached, source=split.images.subset(good))
    return Split(readable, split.labels[good], len(unreadable))


@dataclass(frozen=True)
class CachedImages:
    """The images of a source, decoded once and read from a memory map."""

    source: ImageSource
    preprocess: Preprocess
    folder: Path

    def __len__(self) -> int:
        return len(self.source)

    def read(self, rows: Sequence[int] | Rows) -> Tensor:
        wanted = np.asarray(rows, dtype=np.int64)
        return torch.from_numpy(np.ascontiguousarray(self._pixels[wanted]))

    def key(self, row: int) -> str:
        return self._keys[row]

    def check(self) -> None:
        self._ensure_decoded()

    def find_unreadable(self) -> dict[str, str]:
        """Row → reason, for the images that cannot be decoded; looked for once."""
        listing = self.folder / f"{self.name}.faults.json"
        if self._path.exists():
            return {}
        if not listing.exists():
            with _decoding_pool() as pool:
                reasons = pool.map(self._reason_unreadable, range(len(self)))
                found = {str(row): reason for row, reason in enumerate(reasons) if reason}
            write_json(listing, found)
        known: dict[str, str] = read_json(listing)
        return known

    def _reason_unreadable(self, row: int) -> str:
        try:
            self._decode(row)
        except InputError as error:
            return str(error)
        return ""

    def _decode(self, row: int) -> Tensor:
        return self.preprocess(self.source.open(row))

    @cached_property
    def name(self) -> str:
        text = json.dumps([FORMAT, self.preprocess.key, self.source.identity()])
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    @property
    def _path(self) -> Path:
        return self.folder / f"{self.name}.npy"

    @cached_property
    def _keys(self) -> list[str]:
        keys: list[str] = self._read_cache(
            lambda: json.loads(self._path.with_suffix(".json").read_text())
        )
        return keys

    @cached_property
    def _pixels(self) -> np.ndarray:
        pixels: np.ndarray = self._read_cache(lambda: np.load(self._path, mmap_mode="r"))
        with suppress(OSError):
            os.utime(self._path)  # when it was last used
        return pixels

    def _read_cache(self, read: Callable[[], Any]) -> Any:
        """Decode if needed, then read; again if another process evicts the file in between."""
        while True:
            self._ensure_decoded()
            with suppress(FileNotFoundError):
                return read()

    def _ensure_decoded(self) -> None:
        if self._path.exists():
            return
        limit = size_limit()
        with lock_folder(ensure_dir(self.folder), wait=True):
            if not self._path.exists():
                self._decode_all()
                evict_least_recently_used(self.folder, limit, keep=self._path)

    def _decode_all(self) -> None:
        for left in self.folder.glob("tmp*.npy"):  # of a process that was killed
            left.unlink()
        shape = (len(self), *self._decode(0).shape)
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        temporary = self.folder / f"tmp{secrets.token_hex(8)}.npy"
        try:
            # No memory map: on a full disk a write raises, but a mapped page ends the process.
            with os.fdopen(create_file(temporary), "wb") as file, _decoding_pool() as pool:
                np.lib.format.write_array_header_1_0(file, header)
                for first in range(0, len(self), CHUNK):
                    rows = range(first, min(first + CHUNK, len(self)))
                    for image in pool.map(self._decode, rows):
                        file.write(image.numpy().tobytes())
            keys = [self.source.key(row) for row in range(len(self))]
            write_bytes(self._path.with_suffix(".json"), json.dumps(keys).encode())
            os.replace(temporary, self._path)  # last: a map that exists is complete
        except OSError as error:
            raise storage_error(self._path, error) from error
        finally:
            temporary.unlink(missing_ok=True)


def evict_least_recently_used(folder: Path, limit: float, keep: Path) -> None:
    """Delete the least recently used cache files until the folder is within a limit.

    Args:
        folder: The cache folder; its lock must be held.
        limit: Bytes.
        keep: A file that stays, whatever its size.
    """
    files = sorted(folder.glob("*.npy"), key=lambda path: path.stat().st_mtime)
    total = sum(path.stat().st_size for path in files)
    for path in files:
        if total <= limit:
            return
        if path != keep:
            with suppress(OSError):  # a file of another user stays
                total -= path.stat().st_size
                path.unlink()
                path.with_suffix(".json").unlink(missing_ok=True)


@dataclass(frozen=True)
class CacheEntry:
    """A file of decoded images."""

    name: str
    bytes: int
    images: int
    used: float  # seconds since 1970


def list_cache() -> list[CacheEntry]:
    """The files of decoded images, the least recently used first.

    Example:
        >>> all(entry.bytes > 0 for entry in list_cache())
        True
    """
    entries = []
    for path in cache_folder().glob("*.npy"):
        with suppress(OSError, ValueError):  # deleted or written meanwhile
            facts, images = path.stat(), len(np.load(path, mmap_mode="r"))
            entries.append(CacheEntry(path.stem, facts.st_size, images, facts.st_mtime))
    return sorted(entries, key=lambda entry: entry.used)


def clear_cache() -> list[CacheEntry]:
    """Delete all decoded images; they are decoded again when they are needed.

    Returns:
        What was deleted.
    """
    folder, entries = cache_folder(), list_cache()
    if not folder.exists():
        return []
    with lock_folder(folder, wait=True):
        for path in [*folder.glob("*.npy"), *folder.glob("*.json")]:
            path.unlink(missing_ok=True)
    return entries


def size_limit() -> float:
    """`DOSAPP_CACHE_GB` in bytes."""
    value = os.environ.get("DOSAPP_CACHE_GB") or DEFAULT_GB
    try:
        return float(value) * 1e9
    except ValueError as error:
        raise InputError(f"DOSAPP_CACHE_GB is '{value}'; give a number of gigabytes") from error


def _decoding_pool() -> ThreadPoolExecutor:
    """Threads are enough: Pillow releases the interpreter lock while it decodes."""
    return ThreadPoolExecutor(max(2, os.cpu_count() or 1))
