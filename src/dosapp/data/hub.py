"""Tables of pictures from the hub, through the `datasets` package: the paper's, or any other."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dosapp.core.chance import chance
from dosapp.data.base import Dataset, Part, Rows
from dosapp.data.files import Prepare, opened
from dosapp.data.known import Known
from dosapp.errors import BadInput

TEST = ("test", "validation", "valid", "val")
LABELS = ("label", "labels", "fine_label", "class", "category", "target")


def hub_data(name: str, prepare: Prepare) -> Dataset:
    """One of the paper's, from its pinned place; cached by the library."""
    known = Known.named(name)
    parts = []
    for split in ("train", "test"):
        where, part_of = known.hub[split]
        table = _loaded(where, f"{name} is not on this machine: give --data-dir", part_of)
        column = table.features[known.hub["label"]]
        names = list(getattr(column, "names", None) or known.classes)
        said = known.labels(names, where)  # its own order may be another
        place = np.array([list(known.classes).index(said[name]) for name in names])
        rows = Column(table, known.hub["image"], f"{where}/{part_of}", prepare)
        parts.append(Part(rows, place[np.asarray(table[known.hub["label"]], dtype=np.int64)]))
    return known.dataset(parts[0], parts[1], known.hub["train"][0])


def table_data(where: str, prepare: Prepare) -> Dataset:
    """Any table with a column of pictures and one of labels: a hub id, or a folder of Parquet."""
    tables = _loaded(where, f"data '{where}' is not a folder here")
    if "train" not in tables:
        raise BadInput(f"'{where}' has the splits {', '.join(tables)}, but none named train")
    train, test = tables["train"], next((tables[n] for n in TEST if n in tables), None)
    picture, label = _columns(train.features, where)
    names = getattr(train.features[label], "names", None)
    given = {id(t): t[label] for t in (train, test) if t is not None}
    known = sorted({str(v) for found in given.values() for v in found}, key=_by_number)
    place = {str(n): n for n in range(len(names))} if names else {v: n for n, v in enumerate(known)}

    def part(table: Any, title: str) -> Part:
        labels = np.array([place[str(value)] for value in given[id(table)]], dtype=np.int64)
        return Part(Column(table, picture, f"{where}/{title}", prepare), labels)

    classes = tuple(str(name).replace("_", " ") for name in names or known)
    halves = (part(train, "train"), part(test, "test")) if test else _thirds(part(train, "train"))
    return Dataset(Path(where).name, classes, *halves)


def _loaded(where: str, otherwise: str, split: str | None = None) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise BadInput(
            f"{otherwise}, or pip install 'dosapp[hub]' to get it from the hub ({where})"
        ) from error
    try:
        return datasets.load_dataset(where, split=split)
    except Exception as error:  # the library raises many kinds
        first = str(error).partition("\n")[0]
        raise BadInput(f"{otherwise}, and the hub did not give {where} ({first})") from error


def _columns(features: Any, where: str) -> tuple[str, str]:
    kinds = {name: type(kind).__name__ for name, kind in features.items()}
    picture = next((name for name, kind in kinds.items() if kind == "Image"), None)
    classes = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    label = next((n for n in (*classes, *LABELS) if n in kinds and n != picture), None)
    if picture is None or label is None:
        missing = "pictures" if picture is None else f"labels (like {', '.join(LABELS)})"
        raise BadInput(f"'{where}' has the columns {', '.join(kinds)}, but none with {missing}")
    return picture, label


def _by_number(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdigit() else (10**9, text)


def _thirds(part: Part) -> tuple[Part, Part]:
    """Every third picture of a class, in a fixed shuffle, is for the test."""
    test = np.zeros(len(part.labels), dtype=bool)
    for label in np.unique(part.labels):
        mine = chance("thirds", int(label)).permutation(np.flatnonzero(part.labels == label))
        test[mine[: max(1, len(mine) // 3)]] = True
    rows = [np.flatnonzero(half) for half in (~test, test)]
    column: Any = part.pictures
    taught, asked = (Part(column.only(half.tolist()), part.labels[half]) for half in rows)
    return taught, asked


@dataclass(frozen=True)
class Column:
    """The pictures of a table of the `datasets` library."""

    table: Any
    column: str
    title: str
    prepare: Prepare

    def __len__(self) -> int:
        return len(self.table)

    def read(self, rows: Sequence[int] | Rows) -> Tensor:
        return torch.stack([self.decode(int(row)) for row in rows])

    def decode(self, row: int) -> Tensor:
        return self.prepare(opened(lambda: self._image(row), f"{self.title}, row {row}"))

    def _image(self, row: int) -> Image.Image:
        found = self.table[row][self.column]
        return found if isinstance(found, Image.Image) else Image.open(io.BytesIO(found["bytes"]))

    def key(self, row: int) -> str:
        return f"{self.title}/{row}:{self.table._fingerprint}"

    def identity(self) -> list[str]:
        return [self.title, self.column, self.table._fingerprint]

    def only(self, rows: Sequence[int]) -> "Column":
        return replace(self, table=self.table.select(list(rows)))

    def check(self) -> None: ...
