"""Tables of pictures from the hub, through the `datasets` package: the paper's, or any other."""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dosapp.data.base import Dataset, ImageSource, Rows, Split
from dosapp.data.files import decode_image
from dosapp.data.folder import train_test_split
from dosapp.data.paper_sets.datasets import PaperDataset
from dosapp.errors import InputError

TEST = ("test", "validation", "valid", "val")
LABELS = ("label", "labels", "fine_label", "class", "category", "target")


def load_from_hub(name: str) -> Dataset[ImageSource]:
    """One of the paper's, from its pinned place; cached by the library."""
    known = PaperDataset.named(name)
    parts = []
    for split in ("train", "test"):
        where, part_of = known.hub[split]
        otherwise = f"{name} is not on this machine: give --data-dir"
        table = _loaded(where, otherwise, part_of, known.hub.get("revision"))
        label = known.hub["label"]
        names = list(getattr(table.features[label], "names", None) or known.classes)
        said = known.labels(names, where)  # its own order may be another
        place = np.array([list(known.classes).index(said[name]) for name in names])
        rows = TableImages.from_table(table, known.hub["image"], part_of)
        parts.append(Split(rows, place[_labels(table, label, range(len(names)), where)]))
    return known.dataset(parts[0], parts[1], known.hub["train"][0])


def load_table(where: str) -> Dataset[ImageSource]:
    """Any table with a column of pictures and one of labels: a hub id, or a folder of Parquet."""
    here = Path(where).exists()
    tables = _loaded(where, f"'{where}' has no table in it" if here else f"'{where}' is not here")
    if "train" not in tables:
        raise InputError(f"'{where}' has the splits {', '.join(tables)}, but none named train")
    train, test = tables["train"], next((tables[n] for n in TEST if n in tables), None)
    picture, label = _columns(train.features, where)
    if test is not None and label not in test.features:
        raise InputError(f"'{where}' has no column '{label}' in its test split; it cannot be asked")
    names = getattr(train.features[label], "names", None)
    values: Sequence[Any] = range(len(names)) if names else _values(train, test, label)

    def part(table: Any, split: str) -> Split[ImageSource]:
        labels = _labels(table, label, values, where)
        return Split(TableImages.from_table(table, picture, split), labels)

    classes = tuple(str(name).replace("_", " ") for name in names or values)
    halves = (
        (part(train, "train"), part(test, "test")) if test else _split_files(part(train, "train"))
    )
    return Dataset(Path(where).name, classes, *halves)


def _values(train: Any, test: Any, label: str) -> list[Any]:
    """What a label column without names says, in order."""
    found = {value for table in (train, test) if table for value in table[label]}
    return sorted(found - {None}, key=lambda value: (str(type(value)), value))


def _labels(table: Any, label: str, values: Sequence[Any], where: str) -> Rows:
    place = {value: n for n, value in enumerate(values)}
    given = table[label]
    strange = next((row for row, value in enumerate(given) if value not in place), None)
    if strange is not None:
        raise InputError(
            f"'{where}' has the label {given[strange]} in row {strange}, which is no class; "
            "a split without labels cannot be used"
        )
    return np.array([place[value] for value in given], dtype=np.int64)


def _split_files(part: Split[ImageSource]) -> tuple[Split[ImageSource], Split[ImageSource]]:
    column: Any = part.images
    train, test = train_test_split([str(label) for label in part.labels])
    asked = replace(column.subset(test), split="the test third")
    return Split(column.subset(train), part.labels[train]), Split(asked, part.labels[test])


def _loaded(
    where: str, otherwise: str, split: str | None = None, revision: str | None = None
) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"{otherwise}; tables and the hub need pip install 'dosapp[hub]' ({where})"
        ) from error
    try:
        return datasets.load_dataset(where, split=split, revision=revision)
    except Exception as error:  # the library raises many kinds
        first = str(error).partition("\n")[0]
        who = "the table cannot be read" if Path(where).exists() else "the hub did not give it"
        raise InputError(f"{otherwise}, and {who} ({where}: {first})") from error


def _columns(features: Any, where: str) -> tuple[str, str]:
    kinds = {name: type(kind).__name__ for name, kind in features.items()}
    picture = next((name for name, kind in kinds.items() if kind == "Image"), None)
    classes = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    label = next((n for n in (*classes, *LABELS) if n in kinds and n != picture), None)
    if picture is None or label is None:
        missing = "pictures" if picture is None else f"labels (like {', '.join(LABELS)})"
        raise InputError(f"'{where}' has the columns {', '.join(kinds)}, but none with {missing}")
    return picture, label


@dataclass(frozen=True)
class TableImages:
    """The pictures of a table of the `datasets` library, as the bytes they came in."""

    table: Any
    column: str
    split: str

    @classmethod
    def from_table(cls, table: Any, column: str, split: str) -> "TableImages":
        kind = replace(table.features[column], decode=False)
        return cls(table.cast_column(column, kind), column, split)

    def __len__(self) -> int:
        return len(self.table)

    def open(self, row: int) -> Image.Image:
        return decode_image(lambda: Image.open(io.BytesIO(self._bytes(row))), self._at(row))

    def _bytes(self, row: int) -> bytes:
        cell = self.table[row][self.column]
        if cell is None:
            raise ValueError("it is empty")
        return Path(cell["path"]).read_bytes() if cell["bytes"] is None else bytes(cell["bytes"])

    def _at(self, row: int) -> str:
        return f"row {row} of {self.split}"

    def key(self, row: int) -> str:
        """What is in it, so that a table that was moved or copied has the same pictures."""
        return f"{self.split}/{row}:{hashlib.sha256(self._bytes(row)).hexdigest()[:12]}"

    def identity(self) -> list[str]:
        return [self.split, self.column, self.table._fingerprint]

    def subset(self, rows: Sequence[int]) -> "TableImages":
        return replace(self, table=self.table.select(list(rows)))
