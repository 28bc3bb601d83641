"""One's own pictures: a folder of class folders, or a CSV of path,label[,split].

ROOT/train/CLASS/*  and  ROOT/test/CLASS/*       as they are
ROOT/CLASS/*                                     a third of each class becomes the test part
FILE.csv with columns path, label and perhaps split (train or test)
"""

import csv
import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dosapp.core.chance import chance
from dosapp.data.base import Dataset, Part, Prompts, Rows
from dosapp.errors import BadInput

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".webp", ".tif", ".tiff"}
Prepare = Callable[[Image.Image], Tensor]
Found = list[tuple[Path, str]]  # file, class name


@dataclass(frozen=True)
class Files:
    """Pictures on disk, decoded when first read and kept as uint8."""

    paths: tuple[Path, ...]
    root: Path
    prepare: Prepare
    workers: int = 2
    _decoded: dict[int, Tensor] = field(default_factory=dict, repr=False)
    _keys: dict[int, str] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, rows: Sequence[int] | Rows) -> Tensor:
        wanted = [int(row) for row in rows]
        new = [row for row in wanted if row not in self._decoded]
        with ThreadPoolExecutor(self.workers) as pool:  # Pillow decodes outside the lock
            self._decoded.update(zip(new, pool.map(self._decode, new), strict=True))
        return torch.stack([self._decoded[row] for row in wanted])

    def _decode(self, row: int) -> Tensor:
        return self.prepare(open_image(self.paths[row]))

    def check(self) -> None:
        self.read(range(len(self)))

    def key(self, row: int) -> str:
        """Where it is and what is in it: the same name with other bytes is another picture."""
        if row not in self._keys:
            path = self.paths[row]
            try:
                content = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            except OSError as error:
                raise BadInput(f"image '{path}' cannot be read ({error.strerror})") from error
            self._keys[row] = f"{os.path.relpath(path, self.root)}:{content}"
        return self._keys[row]


def open_image(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except FileNotFoundError as error:
        raise BadInput(f"image '{path}' does not exist") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadInput(f"image '{path}' cannot be read ({error}); replace or remove it") from error


def own_data(place: Path, prepare: Prepare, prompts: Prompts | None = None) -> Dataset:
    if not place.exists():
        raise BadInput(f"data '{place}' does not exist; give a folder of class folders or a CSV")
    train, test = _from_csv(place) if place.is_file() else _from_folder(place)
    names = sorted({name for _, name in train} | {name for _, name in test})
    root = place if place.is_dir() else place.parent
    return Dataset(
        name=place.stem,
        classes=tuple(_readable(name) for name in names),
        train=_part(train, names, root, prepare),
        test=_part(test, names, root, prepare),
        prompts=prompts or Prompts(),
    )


def _readable(name: str) -> str:
    return name.replace("_", " ")


def _part(found: Found, names: list[str], root: Path, prepare: Prepare) -> Part:
    labels = np.array([names.index(name) for _, name in found], dtype=np.int64)
    return Part(Files(tuple(path for path, _ in found), root, prepare), labels)


def _from_folder(root: Path) -> tuple[Found, Found]:
    if (root / "train").is_dir() and (root / "test").is_dir():
        train, test = _classes(root / "train"), _classes(root / "test")
        lonely = {name for _, name in train} ^ {name for _, name in test}
        if lonely:
            raise BadInput(
                f"class '{min(lonely)}' of '{root}' is in only one of train and test; "
                "both need every class"
            )
        return train, test
    return _thirds(_classes(root))


def _classes(root: Path) -> Found:
    folders = sorted(path for path in root.iterdir() if path.is_dir())
    found = [
        (file, folder.name)
        for folder in folders
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in SUFFIXES
    ]
    if not found:
        raise BadInput(f"'{root}' has no class folders with images; put one folder per class in it")
    return found


def _thirds(found: Found) -> tuple[Found, Found]:
    """Every third picture of a class, in a fixed shuffle, is for the test."""
    train: Found = []
    test: Found = []
    for name in sorted({name for _, name in found}):
        mine = [item for item in found if item[1] == name]
        order = chance("thirds", name).permutation(len(mine))
        cut = max(2, len(mine) // 3) if len(mine) > 2 else len(mine) // 2
        test += [mine[i] for i in sorted(order[:cut])]
        train += [mine[i] for i in sorted(order[cut:])]
    return train, test


def _from_csv(path: Path) -> tuple[Found, Found]:
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"'{path}' cannot be read as CSV ({error})") from error
    if not rows or not {"path", "label"} <= set(rows[0]):
        raise BadInput(f"'{path}' needs a header with the columns path and label, and some rows")
    if not all(row["path"] and row["label"] for row in rows):
        raise BadInput(f"'{path}' has a row without a path or a label; every picture needs both")
    found = [(path.parent / row["path"], row["label"]) for row in rows]
    splits = [row.get("split") for row in rows]
    if not any(splits):
        return _thirds(found)
    strange = next((s for s in splits if s not in ("train", "test")), None)
    if strange is not None:
        raise BadInput(f"'{path}' has the split '{strange}'; use train or test")
    pairs = list(zip(found, splits, strict=True))
    return [f for f, s in pairs if s == "train"], [f for f, s in pairs if s == "test"]
