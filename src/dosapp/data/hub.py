"""Tables of images through the `datasets` package: the paper's from the hub, or any other."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dosapp.data.base import Dataset, ImageSource, Rows, Split
from dosapp.data.decoding import decode_image
from dosapp.data.folder import train_test_split
from dosapp.data.paper_sets.datasets import PaperDataset
from dosapp.errors import InputError
from dosapp.runtime.extras import missing_extra

TEST_SPLITS = ("test", "validation", "valid", "val")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "category", "target")


def load_from_hub(name: str) -> Dataset[ImageSource]:
    """Load one of the paper's datasets from its hub id; the `datasets` package caches it.

    Args:
        name: One of `PAPER_DATASETS`.

    Returns:
        The dataset.

    Raises:
        InputError: The package is not installed or the hub cannot be reached.
    """
    paper = PaperDataset.from_name(name)
    image, label = paper.hub["image"], paper.hub["label"]
    splits = []
    for part in ("train", "test"):
        hub_id, hub_split = paper.hub[part]
        problem = f"{name} is not on this machine: give --data-dir"
        table = _load_table(hub_id, problem, hub_split, paper.hub.get("revision"))
        names = list(getattr(table.features[label], "names", None) or paper.classes)
        class_of = paper.match_classes(names, hub_id)  # the table may have another order
        index = np.array([list(paper.classes).index(class_of[name]) for name in names])
        labels = index[_class_indices(table, label, range(len(names)), hub_id)]
        splits.append(Split(TableImages.from_table(table, image, hub_split), labels))
    return paper.build_dataset(splits[0], splits[1], paper.hub["train"][0])


def load_table(where: str, hold_out: bool = True) -> Dataset[ImageSource]:
    """Load any table with a column of images and one of labels.

    Args:
        where: A hub id, a folder of Parquet files, or one written by `save_to_disk`.
        hold_out: Make a third of each class the test split where there is none.

    Returns:
        The dataset.

    Raises:
        InputError: The table cannot be loaded or lacks a column, a split or labels.
    """
    is_local = Path(where).exists()
    problem = f"'{where}' has no table in it" if is_local else f"'{where}' is not a local path"
    return read_tables(_load_table(where, problem), where, hold_out)


def read_tables(tables: Any, where: str, hold_out: bool = True) -> Dataset[ImageSource]:
    """A `datasets.DatasetDict`, or one `datasets.Dataset` for training, as a dataset.

    Args:
        tables: By split.
        where: Their name, for messages.
        hold_out: Make a third of each class the test split where there is none; otherwise all
            images train, and the test split is empty.
    """
    tables = tables if isinstance(tables, Mapping) else {"train": tables}
    if "train" not in tables:
        raise InputError(f"'{where}' has the splits {', '.join(tables)}, but none named train")
    train, test = tables["train"], next((tables[n] for n in TEST_SPLITS if n in tables), None)
    image, label = _find_columns(train.features, where)
    if test is not None and label not in test.features:
        raise InputError(
            f"'{where}' has no column '{label}' in its test split; evaluation needs labels"
        )
    names = getattr(train.features[label], "names", None)
    values: Sequence[Any] = range(len(names)) if names else _distinct_labels(train, test, label)

    def make_split(table: Any, split: str) -> Split[ImageSource]:
        labels = _class_indices(table, label, values, where)
        return Split(TableImages.from_table(table, image, split), labels)

    classes = tuple(str(name).replace("_", " ") for name in names or values)
    split = make_split(train, "train")
    if test is not None:
        splits = (split, make_split(test, "test"))
    elif hold_out:
        splits = _split_by_class(split)
    else:
        splits = (split, Split(split.images.subset([]), split.labels[:0]))
    return Dataset(Path(where).name, classes, *splits)


def _distinct_labels(train: Any, test: Any, label: str) -> list[Any]:
    """The sorted values of a label column that has no class names."""
    values = {value for table in (train, test) if table for value in table[label]}
    return sorted(values - {None}, key=lambda value: (str(type(value)), value))


def _class_indices(table: Any, label: str, values: Sequence[Any], where: str) -> Rows:
    index = {value: n for n, value in enumerate(values)}
    labels = table[label]
    unknown = next((row for row, value in enumerate(labels) if value not in index), None)
    if unknown is not None:
        raise InputError(
            f"'{where}' has the label {labels[unknown]} in row {unknown}, which is no class; "
            "a split without labels cannot be used"
        )
    return np.array([index[value] for value in labels], dtype=np.int64)


def _split_by_class(split: Split[ImageSource]) -> tuple[Split[ImageSource], Split[ImageSource]]:
    images: Any = split.images
    train, test = train_test_split([str(label) for label in split.labels])
    test_images = replace(images.subset(test), split="the test third")  # part of the images' keys
    return Split(images.subset(train), split.labels[train]), Split(test_images, split.labels[test])


def _load_table(
    where: str, problem: str, split: str | None = None, revision: str | None = None
) -> Any:
    try:
        import datasets
    except ImportError as error:
        what = f"{problem}; reading '{where}' as a table or from the hub"
        raise missing_extra(what, "hub", error) from error
    try:
        if is_saved_table(Path(where)):
            return datasets.load_from_disk(where)
        return datasets.load_dataset(where, split=split, revision=revision)
    except Exception as error:  # the library raises many types
        first = str(error).partition("\n")[0]
        is_local = Path(where).exists()
        reason = "the table cannot be read" if is_local else "the hub did not provide it"
        raise InputError(f"{problem}, and {reason} ({where}: {first})") from error


def is_saved_table(path: Path) -> bool:
    """Whether `save_to_disk` of the `datasets` package wrote a folder."""
    return any((path / name).exists() for name in ("dataset_dict.json", "state.json"))


def _find_columns(features: Any, where: str) -> tuple[str, str]:
    """The names of the image and the label column."""
    types = {name: type(feature).__name__ for name, feature in features.items()}
    image = next((name for name, kind in types.items() if kind == "Image"), None)
    class_labels = [name for name, kind in types.items() if kind == "ClassLabel"]
    candidates = (*class_labels, *LABEL_COLUMNS)
    label = next((name for name in candidates if name in types and name != image), None)
    if image is None or label is None:
        missing = "images" if image is None else f"labels (like {', '.join(LABEL_COLUMNS)})"
        raise InputError(f"'{where}' has the columns {', '.join(types)}, but none with {missing}")
    return image, label


@dataclass(frozen=True)
class TableImages:
    """The images of a table of the `datasets` package, encoded as they are stored."""

    table: Any
    column: str
    split: str

    @classmethod
    def from_table(cls, table: Any, column: str, split: str) -> "TableImages":
        """Read a column as encoded bytes."""
        feature = replace(table.features[column], decode=False)
        return cls(table.cast_column(column, feature), column, split)

    def __len__(self) -> int:
        return len(self.table)

    def open(self, row: int) -> Image.Image:
        where = f"row {row} of {self.split}"
        return decode_image(lambda: self._read_bytes(row), where)

    def _read_bytes(self, row: int) -> bytes:
        cell = self.table[row][self.column]
        if cell is None:
            raise ValueError("it is empty")
        return Path(cell["path"]).read_bytes() if cell["bytes"] is None else bytes(cell["bytes"])

    def key(self, row: int) -> str:
        """Row and content, so that a table that was copied has the same keys."""
        return f"{self.split}/{row}:{hashlib.sha256(self._read_bytes(row)).hexdigest()[:12]}"

    def identity(self) -> list[str]:
        return [self.split, self.column, self.table._fingerprint]

    def subset(self, rows: Sequence[int]) -> "TableImages":
        return replace(self, table=self.table.select(list(rows)))
