"""Decoded pictures in one memory-mapped file, so that nothing is decoded or hashed twice.

The file is named after what decides its content: which pictures, and how they are prepared. It is
written beside its place, by one process while others wait, and renamed when it is whole.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dosapp.data.base import Rows, Source
from dosapp.storage import locked, write_bytes

FORMAT = 1


def cache_folder() -> Path:
    """`DOSAPP_CACHE`, or a folder of the user's cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("DOSAPP_CACHE") or home / "dosapp")


@dataclass(frozen=True)
class Decoded:
    """The same pictures as the source's, read from the map once it is there."""

    source: Source
    preparation: str
    folder: Path
    watch: Callable[[int, int], None] = lambda done, of: None

    def __len__(self) -> int:
        return len(self.source)

    def read(self, rows: Sequence[int] | Rows) -> Tensor:
        wanted = np.asarray(rows, dtype=np.int64)
        return torch.from_numpy(np.ascontiguousarray(self.pixels[wanted]))

    def key(self, row: int) -> str:
        return self.keys[row]

    def check(self) -> None:
        assert len(self.pixels) == len(self)

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
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder, wait=True):
            if not place.exists():
                self._make(place)

    def _make(self, place: Path) -> None:
        count, step = len(self), 256
        for left in self.folder.glob("tmp*.npy"):  # by a process that was killed: we have the lock
            left.unlink()
        shape = (count, *self.source.decode(0).shape)
        handle, temporary = tempfile.mkstemp(dir=self.folder, suffix=".npy")
        os.close(handle)
        try:
            whole = np.lib.format.open_memmap(temporary, "w+", dtype=np.uint8, shape=shape)
            with ThreadPoolExecutor(max(2, os.cpu_count() or 1)) as pool:
                for first in range(0, count, step):
                    rows = range(first, min(first + step, count))
                    for row, picture in zip(rows, pool.map(self.source.decode, rows), strict=True):
                        whole[row] = picture.numpy()
                    self.watch(rows[-1] + 1, count)
            whole.flush()
            keys = [self.source.key(row) for row in range(count)]
            write_bytes(self.folder / f"{self.name}.json", json.dumps(keys).encode())
            os.chmod(temporary, 0o644)  # others may share the cache
            os.replace(temporary, place)  # last: a map that is there is whole
        finally:
            Path(temporary).unlink(missing_ok=True)
