"""Official releases of the paper's datasets, as they are when unpacked.

Each function says what a release looks like and gives its training and test part, with labels as
positions in the official class names; None if what lies there is something else.
"""

import hashlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from dosapp.data.base import ImageSource, Split
from dosapp.data.files import SUFFIXES, FileRef, FileTree
from dosapp.data.folder import LabelledFiles, make_split
from dosapp.errors import InputError

Splits = tuple[Split[ImageSource], Split[ImageSource]]
Release = Callable[[FileTree, Sequence[str]], Splits | None]


def plain(name: str) -> str:
    """`001.Black_footed_Albatross` and `Black footed Albatross` are one class."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"^\d+\.", "", name.lower()))


def _at(names: FileTree, ending: str) -> FileRef | None:
    return next((p for n, p in names.items() if n == ending or n.endswith("/" + ending)), None)


def _lines(place: FileRef) -> list[str]:
    return [line.strip() for line in place.read().decode().splitlines() if line.strip()]


def _parts(halves: Sequence[list[tuple[FileRef, int]]], classes: Sequence[str]) -> Splits:
    labels, made = [str(n) for n in range(len(classes))], []
    for half in halves:
        for place, label in half:
            _check(label, classes, place)
        files: LabelledFiles = [(place, str(label)) for place, label in half]
        made.append(make_split(files, labels, half[0][0].path.parent))
    return made[0], made[1]


def _check(label: int, classes: Sequence[str], place: FileRef) -> None:
    if not 0 <= label < len(classes):
        raise InputError(f"'{place}' has a label beyond the {len(classes)} classes of the release")


def aircraft(names: FileTree, classes: Sequence[str]) -> Splits | None:
    """FGVC-Aircraft: `images_variant_{trainval,test}.txt` beside `images/`."""
    lists = [_at(names, f"images_variant_{split}.txt") for split in ("trainval", "test")]
    if None in lists:
        return None
    images = {Path(n).stem: p for n, p in names.items() if p.suffix in SUFFIXES}
    known = [plain(name) for name in classes]
    halves = []
    for place in lists:
        assert place is not None
        pairs = [line.partition(" ")[::2] for line in _lines(place)]
        if extra := next((name for _, name in pairs if plain(name) not in known), None):
            raise InputError(f"'{place}' has a class '{extra}', which the release does not have")
        halves.append([(images[number], known.index(plain(name))) for number, name in pairs])
    return _parts(halves, classes)


def cub(names: FileTree, classes: Sequence[str]) -> Splits | None:
    """CUB-200-2011: three lists by picture number."""
    wanted = ("images.txt", "image_class_labels.txt", "train_test_split.txt")
    lists = [_at(names, name) for name in wanted]
    if None in lists:
        return None
    tables = [dict(line.split() for line in _lines(p)) for p in lists if p is not None]
    paths, labels, taught = tables
    ends = {"/".join(n.split("/")[-2:]): p for n, p in names.items()}
    halves: list[list[tuple[FileRef, int]]] = [[], []]
    for number, path in paths.items():
        halves[taught[number] == "0"].append((ends[path], int(labels[number]) - 1))
    return _parts(halves, classes)


def gtsrb(names: FileTree, classes: Sequence[str]) -> Splits | None:
    """GTSRB: numbered training folders, and a CSV for the final test.

    `Training/` (GTSRB-Training_fixed.zip, torchvision's, 26,640 pictures) is the release we hold
    pictures to; `Final_Training/` (39,209) is taken if it is the only one.
    """
    answers = _at(names, "GT-final_test.csv")
    if answers is None:
        return None
    header, *rows = [line.split(";") for line in _lines(answers)]
    file, label = header.index("Filename"), header.index("ClassId")
    tests = {Path(n).name: p for n, p in names.items() if "Final_Test" in n}
    test = [(tests[row[file]], int(row[label])) for row in rows]
    folders = [n for n, p in names.items() if p.suffix == ".ppm" and "Final_Test" not in n]
    fixed = [n for n in folders if "/Training/" in f"/{n}"]
    final = [n for n in folders if "Final_Training/" in n]
    train = [(names[n], int(n.split("/")[-2])) for n in fixed or final or folders]
    return _parts([train, test], classes)


def cars(names: FileTree, classes: Sequence[str]) -> Splits | None:
    """Stanford Cars: two MATLAB files of annotations beside `cars_train` and `cars_test`."""
    lists = [_at(names, f"cars_{end}.mat") for end in ("train_annos", "test_annos_withlabels")]
    if None in lists:
        return None
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise InputError("the release of cars needs scipy to be read; pip install scipy") from error
    halves = []
    for split, place in zip(("cars_train", "cars_test"), lists, strict=True):
        assert place is not None
        images = {Path(n).name: p for n, p in names.items() if f"/{split}/" in f"/{n}"}
        rows = loadmat(io.BytesIO(place.read()), squeeze_me=True)["annotations"]
        halves.append([(images[str(r["fname"])], int(r["class"]) - 1) for r in rows])
    return _parts(halves, classes)


def cifar100(names: FileTree, classes: Sequence[str]) -> Splits | None:
    """CIFAR-100, the binary version: 1 + 1 + 3072 bytes a picture. (The Python version is a
    pickle, which could execute anything.)"""
    files = [_at(names, f"{split}.bin") for split in ("train", "test")]
    if None in files:
        if _at(names, "meta") is not None and _at(names, "train") is not None:
            raise InputError("this is CIFAR-100's Python version, a pickle; use the binary version")
        return None
    parts = []
    for place in files:
        assert place is not None
        raw = np.frombuffer(place.read(), dtype=np.uint8)
        if len(raw) % 3074:
            raise InputError(f"'{place}' is not CIFAR-100's binary version; its size is {len(raw)}")
        raw = raw.reshape(-1, 3074)  # coarse label, fine label, pixels
        _check(int(raw[:, 1].max(initial=0)), classes, place)
        source = ArrayImages(raw[:, 2:].reshape(-1, 3, 32, 32), Path(str(place)).stem)
        parts.append(Split(source, raw[:, 1].astype(np.int64)))
    return parts[0], parts[1]


@dataclass(frozen=True)
class ArrayImages:
    """ImageArray that were never encoded, `uint8 [N, 3, H, W]`, prepared when they are decoded."""

    pixels: np.ndarray
    title: str

    def __len__(self) -> int:
        return len(self.pixels)

    def open(self, row: int) -> Image.Image:
        return Image.fromarray(self.pixels[row].transpose(1, 2, 0))

    def key(self, row: int) -> str:
        content = hashlib.sha256(self.pixels[row].tobytes()).hexdigest()[:12]
        return f"{self.title}/{row}:{content}"

    def identity(self) -> list[str]:
        return [self.title, hashlib.sha256(self.pixels.tobytes()).hexdigest()]

    def subset(self, rows: Sequence[int]) -> "ArrayImages":
        return replace(self, pixels=self.pixels[list(rows)])


RELEASES: Mapping[str, Release] = {
    "aircraft": aircraft,
    "cars": cars,
    "cifar100": cifar100,
    "cub": cub,
    "gtsrb": gtsrb,
}
