"""CachedImages pictures in one memory-mapped file, so that nothing is decoded or hashed twice.

The file is named after what decides its content: which pictures, and how they are prepared. It is
written beside its place, by one process while others wait, and renamed when it is whole.
"""

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dosapp.data.base import ImageSource, Listing, Rows, Split
from dosapp.errors import InputError
from dosapp.runtime.files import (
    ensure_dir,
    lock_folder,
    read_json,
    storage_error,
    write_bytes,
    write_json,
)

FORMAT = 1


def cache_folder() -> Path:
    """For pictures: below `DOSAPP_CACHE`, or a folder of the user's cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("DOSAPP_CACHE") or home / "dosapp") / "pictures"


def cache_split(half: Listing, preparation: str, skip_bad: bool) -> Split:
    """Its pictures behind a memory map, and perhaps without those that cannot be read."""
    found = CachedImages(half.source, preparation, cache_folder())
    if not skip_bad or not (faults := found.faults()):
        return Split(found, half.labels)
    first = next(iter(faults.values()))
    warnings.warn(f"{len(faults)} picture(s) are left out; the first: {first}", stacklevel=4)
    good = [row for row in range(len(found)) if str(row) not in faults]
    return Split(replace(found, source=half.source.subset(good)), half.labels[good], len(faults))


@dataclass(frozen=True)
class CachedImages:
    """The same pictures as the source's, read from the map once it is there."""

    source: ImageSource
    preparation: str
    folder: Path

    def __len__(self) -> int:
        return len(self.source)

    def read(self, rows: Sequence[int] | Rows) -> Tensor:
        wanted = np.asarray(rows, dtype=np.int64)
        return torch.from_numpy(np.ascontiguousarray(self.pixels[wanted]))

    def key(self, row: int) -> str:
        return self.keys[row]

    def check(self) -> None:
        self._made()  # decodes every picture; one that cannot be read is named

    def faults(self) -> dict[str, str]:
        """What is wrong with the pictures that cannot be read, by row; looked for once."""
        place = self.folder / f"{self.name}.faults.json"
        if (self.folder / f"{self.name}.npy").exists():
            return {}
        if not place.exists():
            with _pool() as pool:
                said = pool.map(self._fault, range(len(self)))
                found = {str(row): text for row, text in enumerate(said) if text}
            write_json(place, found)
        listed: dict[str, str] = read_json(place)
        return listed

    def _fault(self, row: int) -> str:
        try:
            self.source.decode(row)
        except InputError as error:
            return str(error)
        return ""

    @cached_property
    def name(self) -> str:
        text = json.dumps([FORMAT, self.preparation, self.source.identity()])
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    @cached_property
    def keys(self) -> list[str]:
        self._made()
        found: list[str] = json.loads((self.folder / f"{self.name}.json").read_text())
        return found

    @cached_property
    def pixels(self) -> np.ndarray:
        self._made()
        found: np.ndarray = np.load(self.folder / f"{self.name}.npy", mmap_mode="r")
        return found

    def _made(self) -> None:
        place = self.folder / f"{self.name}.npy"
        if place.exists():
            return
        with lock_folder(ensure_dir(self.folder), wait=True):
            if not place.exists():
                self._make(place)

    def _make(self, place: Path) -> None:
        count, step = len(self), 256
        for left in self.folder.glob("tmp*.npy"):  # by a process that was killed: we have the lock
            left.unlink()
        shape = (count, *self.source.decode(0).shape)
        handle, temporary = tempfile.mkstemp(dir=self.folder, suffix=".npy")
        head = {"descr": "|u1", "fortran_order": False, "shape": shape}
        try:
            # Not through the map: on a full disk a write fails, but a mapped page ends the process.
            with os.fdopen(handle, "wb") as file, _pool() as pool:
                np.lib.format.write_array_header_1_0(file, head)
                for first in range(0, count, step):
                    rows = range(first, min(first + step, count))
                    for picture in pool.map(self.source.decode, rows):
                        file.write(picture.numpy().tobytes())
            keys = [self.source.key(row) for row in range(count)]
            write_bytes(self.folder / f"{self.name}.json", json.dumps(keys).encode())
            os.chmod(temporary, 0o644)  # others may share the cache
            os.replace(temporary, place)  # last: a map that is there is whole
        except OSError as error:
            raise storage_error(place, error) from error
        finally:
            Path(temporary).unlink(missing_ok=True)


def _pool() -> ThreadPoolExecutor:
    """Pillow decodes outside Python's lock."""
    return ThreadPoolExecutor(max(2, os.cpu_count() or 1))
