"""One's own pictures, in folders, tar archives or lists.

ROOT/train/CLASS/*  and  ROOT/test/CLASS/*       as they are
ROOT/CLASS/*                                     a third of each class becomes the test part
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

from dosapp.data.base import Listed, Listing
from dosapp.data.files import (
    SUFFIXES,
    FileImages,
    FileRef,
    FileTree,
    Prepare,
    list_files,
    strip_outer_folder,
)
from dosapp.errors import InputError
from dosapp.runtime.rng import numpy_rng

LabelledFiles = list[tuple[FileRef, str]]  # picture, class name


def load_folder(place: Path, prepare: Prepare) -> Listed:
    if not place.exists():
        raise InputError(f"data '{place}' does not exist; give a folder of class folders or a CSV")
    train, test = find_images(place)
    names = sorted({name for _, name in train} | {name for _, name in test})
    root = place if place.is_dir() else place.parent
    return Listed(
        name=place.stem,
        classes=tuple(_readable(name) for name in names),
        train=make_split(train, names, root, prepare),
        test=make_split(test, names, root, prepare),
    )


def find_images(place: Path) -> tuple[LabelledFiles, LabelledFiles]:
    """Training and test pictures with their class names, whatever the layout."""
    if place.is_file() and place.suffix != ".tar":
        return _from_csv(place)
    names = strip_outer_folder(list_files(place))
    shards = {n: p for n, p in names.items() if n.endswith(".tar") and "/" not in n}
    pictures = any(p.suffix in SUFFIXES for p in names.values())
    if (shards and not pictures) or _is_shard(names):
        return _from_shards(shards or {place.name: FileRef(place)})
    return from_folders(names, place)


def make_split(found: LabelledFiles, names: list[str], root: Path, prepare: Prepare) -> Listing:
    position = {name: n for n, name in enumerate(names)}
    labels = np.array([position[name] for _, name in found], dtype=np.int64)
    return Listing(FileImages(tuple(place for place, _ in found), root, prepare), labels)


def _readable(name: str) -> str:
    return name.replace("_", " ")


def from_folders(names: FileTree, root: Path) -> tuple[LabelledFiles, LabelledFiles]:
    tops = {name.partition("/")[0] for name in names if "/" in name}
    asked = next((name for name in ("test", "val") if name in tops), "")
    if "train" not in tops or not asked:
        return _split_files(_classes(names, root))
    train, test = (
        _classes({n.removeprefix(f"{s}/"): p for n, p in names.items() if n.startswith(f"{s}/")},
                 root / s)
        for s in ("train", asked)
    )  # fmt: skip
    lonely = {name for _, name in train} ^ {name for _, name in test}
    if lonely:
        raise InputError(
            f"class '{min(lonely)}' of '{root}' is in only one of train and test; "
            "both need every class"
        )
    return train, test


def _classes(names: FileTree, root: Path) -> LabelledFiles:
    found = [
        (place, name.partition("/")[0])
        for name, place in names.items()
        if "/" in name and place.suffix in SUFFIXES
    ]
    if not found:
        raise InputError(
            f"'{root}' has no class folders with images; put one folder per class in it"
        )
    return sorted(found, key=lambda item: item[1])


def _split_files(found: LabelledFiles) -> tuple[LabelledFiles, LabelledFiles]:
    train, test = train_test_split([name for _, name in found])
    return [found[i] for i in train], [found[i] for i in test]


def train_test_split(names: Sequence[str]) -> tuple[list[int], list[int]]:
    """Rows to teach and to test: every third of a class, in a fixed shuffle, is for the test."""
    train: list[int] = []
    test: list[int] = []
    for name in sorted(set(names)):
        mine = [row for row, other in enumerate(names) if other == name]
        order = numpy_rng("thirds", name).permutation(len(mine))
        cut = max(2, len(mine) // 3) if len(mine) > 2 else len(mine) // 2
        test += [mine[i] for i in sorted(order[:cut])]
        train += [mine[i] for i in sorted(order[cut:])]
    return train, test


# WebDataset: KEY.jpg and KEY.cls (or KEY.txt, or "label" in KEY.json) with the same KEY


def _is_shard(names: FileTree) -> bool:
    stems = {_key(name) for name, place in names.items() if place.suffix in SUFFIXES}
    return any(name.endswith(LABELS) and _key(name) in stems for name in names)


LABELS = (".cls", ".txt", ".json")


def _key(name: str) -> str:
    """Everything before the first dot of the last part of a name."""
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]


def _from_shards(shards: FileTree) -> tuple[LabelledFiles, LabelledFiles]:
    train: LabelledFiles = []
    test: LabelledFiles = []
    for name, place in sorted(shards.items()):
        words = re.split(r"[^a-z]+", Path(name).stem.lower())
        into = test if {"test", "val", "validation"} & set(words) else train
        into += _pairs(list_files(place.path), place.path)
    return (train, test) if test else _split_files(train)


def _pairs(names: FileTree, shard: Path) -> LabelledFiles:
    labels: dict[str, str] = {}
    for name, place in names.items():
        if name.endswith(".json"):
            try:
                said = json.loads(place.read())
            except ValueError as error:
                raise InputError(f"'{shard}' has a '{name}' that is not JSON ({error})") from error
            if (
                isinstance(said, dict)
                and (found := said.get("label", said.get("class"))) is not None
            ):
                labels.setdefault(_key(name), str(found))
        elif name.endswith(LABELS):
            labels[_key(name)] = place.read().decode().strip()
    pairs = []
    for name, place in names.items():
        if place.suffix in SUFFIXES:
            label = labels.get(_key(name))
            if not label:
                raise InputError(f"'{shard}' has a picture '{name}' without a .cls beside it")
            pairs.append((place, label))
    if not pairs:
        raise InputError(f"'{shard}' has no pictures in it")
    return pairs


def _from_csv(path: Path) -> tuple[LabelledFiles, LabelledFiles]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # Excel writes a mark first
            rows = list(csv.DictReader(file, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"'{path}' cannot be read as CSV ({error})") from error
    if not rows or not {"path", "label"} <= set(rows[0]):
        raise InputError(f"'{path}' needs a header with the columns path and label, and some rows")
    if not all(row["path"] and row["label"] for row in rows):
        raise InputError(f"'{path}' has a row without a path or a label; every picture needs both")
    found = [(FileRef(path.parent / row["path"]), row["label"]) for row in rows]
    splits = [row.get("split") for row in rows]
    if not any(splits):
        return _split_files(found)
    strange = [str(s or "") for s in splits if s not in ("train", "test")]
    if strange:
        raise InputError(f"'{path}' has the split '{strange[0]}'; use train or test")
    pairs = list(zip(found, splits, strict=True))
    return [f for f, s in pairs if s == "train"], [f for f, s in pairs if s == "test"]
