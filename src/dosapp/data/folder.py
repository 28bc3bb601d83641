"""A user's own images, in folders, tar archives or lists.

ROOT/train/CLASS/*  and  ROOT/test/CLASS/*       as they are
ROOT/CLASS/*                                     a third of each class becomes the test split
either of them as one uncompressed ROOT.tar
ROOT/*.tar with KEY.jpg beside KEY.cls           WebDataset shards; `test` or `val` in a name splits
FILE.csv with columns path, label and perhaps split (train or test)
"""

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dosapp.data.base import Dataset, ImageSource, Split
from dosapp.data.files import (
    SUFFIXES,
    FileImages,
    FileRef,
    FileTree,
    list_files,
    strip_outer_folder,
)
from dosapp.errors import InputError
from dosapp.runtime.rng import numpy_rng

LabelledFiles = list[tuple[FileRef, str]]  # image, class name

LABEL_SUFFIXES = (".cls", ".txt", ".json")  # of WebDataset shards


def load_folder(path: Path) -> Dataset[ImageSource]:
    """Load a folder, a tar archive or a CSV file of images."""
    if not path.exists():
        raise InputError(f"data '{path}' does not exist; give a folder of class folders or a CSV")
    train, test = find_images(path)
    names = sorted({name for _, name in train} | {name for _, name in test})
    root = path if path.is_dir() else path.parent
    return Dataset(
        name=path.stem,
        classes=tuple(name.replace("_", " ") for name in names),
        train=make_split(train, names, root),
        test=make_split(test, names, root),
    )


def find_images(path: Path) -> tuple[LabelledFiles, LabelledFiles]:
    """Training and test images with their class names, whatever the layout."""
    if path.is_file() and path.suffix != ".tar":
        return _read_csv(path)
    files = strip_outer_folder(list_files(path))
    shards = {n: f for n, f in files.items() if n.endswith(".tar") and "/" not in n}
    has_images = any(file.suffix in SUFFIXES for file in files.values())
    if (shards and not has_images) or _is_shard(files):
        return _read_shards(shards or {path.name: FileRef(path)})
    return read_class_folders(files, path)


def make_split(files: LabelledFiles, names: Sequence[str], root: Path) -> Split[ImageSource]:
    """Files and class names as a split; labels are indices of `names`."""
    index = {name: n for n, name in enumerate(names)}
    labels = np.array([index[name] for _, name in files], dtype=np.int64)
    return Split(FileImages(tuple(file for file, _ in files), root), labels)


def read_class_folders(files: FileTree, root: Path) -> tuple[LabelledFiles, LabelledFiles]:
    """Class folders, below train and test if they are there."""
    tops = {name.partition("/")[0] for name in files if "/" in name}
    test_name = next((name for name in ("test", "val") if name in tops), "")
    if "train" not in tops or not test_name:
        return _split_files(_class_folders(files, root))
    train, test = (
        _class_folders(
            {n.removeprefix(f"{s}/"): f for n, f in files.items() if n.startswith(f"{s}/")},
            root / s,
        )
        for s in ("train", test_name)
    )
    unpaired = {name for _, name in train} ^ {name for _, name in test}
    if unpaired:
        raise InputError(
            f"class '{min(unpaired)}' of '{root}' is in only one of train and test; "
            "both need every class"
        )
    return train, test


def _class_folders(files: FileTree, root: Path) -> LabelledFiles:
    found = [
        (file, name.partition("/")[0])
        for name, file in files.items()
        if "/" in name and file.suffix in SUFFIXES
    ]
    if not found:
        raise InputError(
            f"'{root}' has no class folders with images; put one folder per class in it"
        )
    return sorted(found, key=lambda item: item[1])


def _split_files(files: LabelledFiles) -> tuple[LabelledFiles, LabelledFiles]:
    train, test = train_test_split([name for _, name in files])
    return [files[i] for i in train], [files[i] for i in test]


def train_test_split(names: Sequence[str]) -> tuple[list[int], list[int]]:
    """Rows for training and for testing: a third of each class, in a fixed shuffle, is tested."""
    train: list[int] = []
    test: list[int] = []
    for name in sorted(set(names)):
        rows = [row for row, other in enumerate(names) if other == name]
        order = numpy_rng("thirds", name).permutation(len(rows))
        count = max(2, len(rows) // 3) if len(rows) > 2 else len(rows) // 2
        test += [rows[i] for i in sorted(order[:count])]
        train += [rows[i] for i in sorted(order[count:])]
    return train, test


# WebDataset: KEY.jpg and KEY.cls (or KEY.txt, or "label" in KEY.json) with the same KEY


def _is_shard(files: FileTree) -> bool:
    keys = {_shard_key(name) for name, file in files.items() if file.suffix in SUFFIXES}
    return any(name.endswith(LABEL_SUFFIXES) and _shard_key(name) in keys for name in files)


def _shard_key(name: str) -> str:
    """Everything before the first dot of the last part of a name."""
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]


def _read_shards(shards: FileTree) -> tuple[LabelledFiles, LabelledFiles]:
    train: LabelledFiles = []
    test: LabelledFiles = []
    for name, file in sorted(shards.items()):
        words = re.split(r"[^a-z]+", Path(name).stem.lower())
        into = test if {"test", "val", "validation"} & set(words) else train
        into += _read_shard(list_files(file.path), file.path)
    return (train, test) if test else _split_files(train)


def _read_shard(files: FileTree, shard: Path) -> LabelledFiles:
    labels: dict[str, str] = {}
    for name, file in files.items():
        if name.endswith(".json"):
            try:
                facts = json.loads(file.read())
            except ValueError as error:
                raise InputError(f"'{shard}' has a '{name}' that is not JSON ({error})") from error
            label = facts.get("label", facts.get("class")) if isinstance(facts, dict) else None
            if label is not None:
                labels.setdefault(_shard_key(name), str(label))
        elif name.endswith(LABEL_SUFFIXES):
            labels[_shard_key(name)] = file.read().decode().strip()
    found = []
    for name, file in files.items():
        if file.suffix in SUFFIXES:
            label = labels.get(_shard_key(name))
            if not label:
                raise InputError(f"'{shard}' has an image '{name}' without a .cls beside it")
            found.append((file, label))
    if not found:
        raise InputError(f"'{shard}' has no images in it")
    return found


def _read_csv(path: Path) -> tuple[LabelledFiles, LabelledFiles]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # Excel writes a byte order mark
            rows = list(csv.DictReader(file, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"'{path}' cannot be read as CSV ({error})") from error
    if not rows or not {"path", "label"} <= set(rows[0]):
        raise InputError(f"'{path}' needs a header with the columns path and label, and some rows")
    if not all(row["path"] and row["label"] for row in rows):
        raise InputError(f"'{path}' has a row without a path or a label; every image needs both")
    found = [(FileRef(path.parent / row["path"]), row["label"]) for row in rows]
    splits = [row.get("split") for row in rows]
    if not any(splits):
        return _split_files(found)
    unknown = [str(split or "") for split in splits if split not in ("train", "test")]
    if unknown:
        raise InputError(f"'{path}' has the split '{unknown[0]}'; use train or test")
    pairs = list(zip(found, splits, strict=True))
    return [f for f, s in pairs if s == "train"], [f for f, s in pairs if s == "test"]
