"""A user's own images, in folders, tar archives or lists.

ROOT/train/CLASS/*  and  ROOT/test/CLASS/*       as they are
ROOT/CLASS/*                                     a third of each class becomes the test split
either of them as one uncompressed ROOT.tar, or as ROOT.zip
ROOT/classes.json                                names of classes whose folders are numbers
ROOT/*.tar with KEY.jpg beside KEY.cls           WebDataset shards; `test` or `val` in a name splits
FILE.csv with columns path, label and perhaps split (train or test)
"""

import csv
import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dosapp.data.base import Dataset, ImageSource, Split
from dosapp.data.files import (
    ARCHIVES,
    SUFFIXES,
    FileImages,
    FileRef,
    FileTree,
    find_empty_folders,
    list_files,
    strip_outer_folder,
    warn_of_unread_images,
)
from dosapp.errors import InputError
from dosapp.runtime.rng import numpy_rng

LabelledFiles = list[tuple[FileRef, str]]  # image, class name

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
LABEL_SUFFIXES = (".cls", ".txt", ".json")  # of WebDataset shards


def load_folder(path: Path, hold_out: bool = True) -> Dataset[ImageSource]:
    """Load a folder, an archive or a CSV file of images.

    Args:
        path: Where the images are.
        hold_out: Make a third of each class the test split where there is none; otherwise all
            images train, and the test split is empty.
    """
    if not path.exists():
        raise InputError(f"data '{path}' does not exist; give a folder of class folders or a CSV")
    train, test = find_images(path, hold_out)
    names = sorted({name for _, name in train} | {name for _, name in test})
    root = path if path.is_dir() else path.parent
    return Dataset(
        name=path.stem,
        classes=_class_titles(names, path),
        train=make_split(train, names, root),
        test=make_split(test, names, root),
    )


def find_images(path: Path, hold_out: bool = True) -> tuple[LabelledFiles, LabelledFiles]:
    """Training and test images with their class names, whatever the layout."""
    if path.is_dir() and (empty := find_empty_folders(path)):
        listed = ", ".join(f"'{name}'" for name in empty)
        warnings.warn(f"left out of '{path}', because they hold no images: {listed}", stacklevel=3)
    if path.is_dir():
        warn_of_unread_images(path)
    train, test = _find_labelled(path)
    return (train, test) if test or not hold_out else _split_files(train)


def _find_labelled(path: Path) -> tuple[LabelledFiles, LabelledFiles]:
    """Training and test images; without a test part there are no test images."""
    if path.name.lower().endswith(COMPRESSED):
        folder = path.name.partition(".")[0]
        raise InputError(
            f"'{path}' is compressed, so its images cannot be read one by one; unpack it and give "
            f"the folder: mkdir {folder} && tar -xf {path} -C {folder}"
        )
    if path.is_file() and path.suffix.lower() not in ARCHIVES:
        return _read_csv(path)
    files = strip_outer_folder(list_files(path))
    shards = {n: f for n, f in files.items() if n.endswith(".tar") and "/" not in n}
    has_images = any(file.suffix in SUFFIXES for file in files.values())
    if (shards and not has_images) or _is_shard(files):
        return _read_shards(shards or {path.name: FileRef(path)})
    return _read_class_folders(files, path)


def read_class_names(files: FileTree) -> list[str] | None:
    """Class names in label order from a `classes.json` among the files; None without one."""
    file = next((file for name, file in files.items() if Path(name).name == "classes.json"), None)
    if file is None:
        return None
    try:
        names = json.loads(file.read())
    except ValueError as error:
        raise InputError(f"'{file}' is not JSON ({error})") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"'{file}' is not a list of class names in label order")
    return names


def _class_titles(names: Sequence[str], path: Path) -> tuple[str, ...]:
    """Class names that CLIP can read; folders that are numbers are named by `classes.json`."""
    titles = tuple(name.replace("_", " ") for name in names)
    if not all(name.isdecimal() for name in names):
        return titles
    is_listed = path.is_dir() or path.suffix.lower() in ARCHIVES
    listed = read_class_names(list_files(path)) if is_listed else None
    if listed is None:
        warnings.warn(
            f"the classes of '{path}' are numbers ('{names[0]}', …), which mean nothing to CLIP; "
            "put a list of their names, in this order, into classes.json beside the class folders",
            stacklevel=4,
        )
        return titles
    unnamed = next((name for name in names if int(name) >= len(listed)), None)
    if unnamed is not None:
        raise InputError(
            f"classes.json of '{path}' has {len(listed)} names, counted from 0, and none for the "
            f"folder '{unnamed}'"
        )
    return tuple(listed[int(name)] for name in names)


def make_split(files: LabelledFiles, names: Sequence[str], root: Path) -> Split[ImageSource]:
    """Files and class names as a split; labels are indices of `names`."""
    index = {name: n for n, name in enumerate(names)}
    labels = np.array([index[name] for _, name in files], dtype=np.int64)
    return Split(FileImages(tuple(file for file, _ in files), root), labels)


def _read_class_folders(files: FileTree, root: Path) -> tuple[LabelledFiles, LabelledFiles]:
    """Class folders, below train and test if they are there."""
    tops = {name.partition("/")[0] for name in files if "/" in name}
    test_name = next((name for name in ("test", "val") if name in tops), "")
    if "train" not in tops or not test_name:
        return _class_folders(files, root), []
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
    return train, test


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


def read_task_groups(path: Path, column: str) -> list[list[str]]:
    """Tasks by a column of a CSV: classes whose smallest value is equal form a task.

    Args:
        path: The CSV file.
        column: For example `date` with ISO dates (2026-03-01, or 2026-03 for whole months).

    Returns:
        Class names of each task, in the order of the values.
    """
    if path.suffix.lower() != ".csv":
        raise InputError(f"task_column is '{column}', but '{path}' is no CSV; give one with it")
    rows = _read_rows(path)
    if column not in rows[0]:
        raise InputError(f"'{path}' has the columns {', '.join(rows[0])}, but no '{column}'")
    if not all(row[column] for row in rows):
        raise InputError(f"'{path}' has a row without a value in '{column}'; every image needs one")
    is_number = all(row[column].isdecimal() for row in rows)  # 2 comes before 10
    first: dict[str, str | int] = {}
    for row in rows:
        name = row["label"].replace("_", " ")
        value = int(row[column]) if is_number else row[column]
        first[name] = min(first.get(name, value), value)
    values = sorted(set(first.values()))
    return [sorted(name for name in first if first[name] == value) for value in values]


def _read_rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # Excel writes a byte order mark
            rows = list(csv.DictReader(file, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"'{path}' cannot be read as CSV ({error})") from error
    if not rows or not {"path", "label"} <= set(rows[0]):
        other = (
            "" if path.suffix.lower() == ".csv" else ", or is no data: give a folder, tar or zip"
        )
        raise InputError(
            f"'{path}' needs a header with the columns path and label, and some rows{other}"
        )
    if not all(row["path"] and row["label"] for row in rows):
        raise InputError(f"'{path}' has a row without a path or a label; every image needs both")
    return rows


def _read_csv(path: Path) -> tuple[LabelledFiles, LabelledFiles]:
    rows = _read_rows(path)
    found = [(FileRef(path.parent / row["path"]), row["label"]) for row in rows]
    splits = [row.get("split") for row in rows]
    if not any(splits):
        return found, []
    unknown = [str(split or "") for split in splits if split not in ("train", "test")]
    if unknown:
        raise InputError(f"'{path}' has the split '{unknown[0]}'; use train or test")
    pairs = list(zip(found, splits, strict=True))
    return [f for f, s in pairs if s == "train"], [f for f, s in pairs if s == "test"]
