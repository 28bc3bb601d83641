"""Readers of the official releases of the paper's datasets, as they unpack.

A reader returns training and test split, with labels that are indices of the official class names,
or None if the files are not that release.
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

Splits = tuple[Split[ImageSource], Split[ImageSource]]  # train, test
Reader = Callable[[FileTree, Sequence[str]], Splits | None]


def normalize_name(name: str) -> str:
    """Reduce a class name to letters and digits, without a leading number.

    Example:
        >>> normalize_name("001.Black_footed_Albatross") == normalize_name("Black footed Albatross")
        True
    """
    return re.sub(r"[^a-z0-9]", "", re.sub(r"^\d+\.", "", name.lower()))


def read_aircraft(files: FileTree, classes: Sequence[str]) -> Splits | None:
    """FGVC-Aircraft: `images_variant_{trainval,test}.txt` beside `images/`."""
    lists = _find_files(files, [f"images_variant_{part}.txt" for part in ("trainval", "test")])
    if lists is None:
        return None
    images = {Path(name).stem: file for name, file in files.items() if file.suffix in SUFFIXES}
    known = [normalize_name(name) for name in classes]
    parts = []
    for file in lists:
        rows = [line.partition(" ")[::2] for line in _read_lines(file)]
        unknown = next((name for _, name in rows if normalize_name(name) not in known), None)
        if unknown:
            raise InputError(f"'{file}' has a class '{unknown}', which the release does not have")
        parts.append([(images[number], known.index(normalize_name(name))) for number, name in rows])
    return _make_splits(parts, classes)


def read_cub(files: FileTree, classes: Sequence[str]) -> Splits | None:
    """CUB-200-2011: three lists by image number."""
    lists = _find_files(files, ["images.txt", "image_class_labels.txt", "train_test_split.txt"])
    if lists is None:
        return None
    tables = [dict(line.split() for line in _read_lines(file)) for file in lists]
    paths, labels, is_train = tables
    images = {"/".join(name.split("/")[-2:]): file for name, file in files.items()}
    parts: list[list[tuple[FileRef, int]]] = [[], []]
    for number, path in paths.items():
        parts[is_train[number] == "0"].append((images[path], int(labels[number]) - 1))
    return _make_splits(parts, classes)


def read_gtsrb(files: FileTree, classes: Sequence[str]) -> Splits | None:
    """GTSRB: numbered training folders, and a CSV for the final test.

    `Training/` (GTSRB-Training_fixed.zip, also torchvision's, 26,640 images) is the release that
    numbers of images are compared with; `Final_Training/` (39,209) is used if it is the only one.
    """
    lists = _find_files(files, ["GT-final_test.csv"])
    if lists is None:
        return None
    header, *rows = [line.split(";") for line in _read_lines(lists[0])]
    name_column, label_column = header.index("Filename"), header.index("ClassId")
    test_files = {Path(name).name: file for name, file in files.items() if "Final_Test" in name}
    test = [(test_files[row[name_column]], int(row[label_column])) for row in rows]
    names = [n for n, file in files.items() if file.suffix == ".ppm" and "Final_Test" not in n]
    fixed = [name for name in names if "/Training/" in f"/{name}"]
    final = [name for name in names if "Final_Training/" in name]
    train = [(files[name], int(name.split("/")[-2])) for name in fixed or final or names]
    return _make_splits([train, test], classes)


def read_cars(files: FileTree, classes: Sequence[str]) -> Splits | None:
    """Stanford Cars: two MATLAB files of annotations beside `cars_train` and `cars_test`."""
    lists = _find_files(files, ["cars_train_annos.mat", "cars_test_annos_withlabels.mat"])
    if lists is None:
        return None
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise InputError("the release of cars needs scipy to be read; pip install scipy") from error
    parts = []
    for split, file in zip(("cars_train", "cars_test"), lists, strict=True):
        images = {Path(name).name: f for name, f in files.items() if f"/{split}/" in f"/{name}"}
        rows = loadmat(io.BytesIO(file.read()), squeeze_me=True)["annotations"]
        parts.append([(images[str(row["fname"])], int(row["class"]) - 1) for row in rows])
    return _make_splits(parts, classes)


def read_cifar100(files: FileTree, classes: Sequence[str]) -> Splits | None:
    """CIFAR-100, binary version: 1 + 1 + 3072 bytes per image.

    The Python version is refused: it is a pickle, which can execute code.
    """
    binaries = _find_files(files, ["train.bin", "test.bin"])
    if binaries is None:
        if _find_files(files, ["meta", "train"]) is not None:
            raise InputError("this is CIFAR-100's Python version, a pickle; use the binary version")
        return None
    splits = []
    for file in binaries:
        data = np.frombuffer(file.read(), dtype=np.uint8)
        if len(data) % 3074:
            raise InputError(f"'{file}' is not CIFAR-100's binary version; its size is {len(data)}")
        data = data.reshape(-1, 3074)  # coarse label, fine label, pixels
        _check_label(int(data[:, 1].max(initial=0)), classes, file)
        images = ArrayImages(data[:, 2:].reshape(-1, 3, 32, 32), Path(str(file)).stem)
        splits.append(Split(images, data[:, 1].astype(np.int64)))
    return splits[0], splits[1]


READERS: Mapping[str, Reader] = {
    "aircraft": read_aircraft,
    "cars": read_cars,
    "cifar100": read_cifar100,
    "cub": read_cub,
    "gtsrb": read_gtsrb,
}


@dataclass(frozen=True)
class ArrayImages:
    """Images that were never encoded: one array."""

    pixels: np.ndarray  # uint8 [N, 3, H, W]
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


def _find_files(files: FileTree, names: Sequence[str]) -> list[FileRef] | None:
    """The first file of each name, in any folder; None if one is missing."""
    matches = [
        next((file for path, file in files.items() if f"/{path}".endswith(f"/{name}")), None)
        for name in names
    ]
    present = [file for file in matches if file is not None]
    return present if len(present) == len(names) else None


def _read_lines(file: FileRef) -> list[str]:
    return [line.strip() for line in file.read().decode().splitlines() if line.strip()]


def _make_splits(parts: Sequence[list[tuple[FileRef, int]]], classes: Sequence[str]) -> Splits:
    names = [str(n) for n in range(len(classes))]
    splits = []
    for part in parts:
        for file, label in part:
            _check_label(label, classes, file)
        labelled: LabelledFiles = [(file, str(label)) for file, label in part]
        splits.append(make_split(labelled, names, part[0][0].path.parent))
    return splits[0], splits[1]


def _check_label(label: int, classes: Sequence[str], file: FileRef) -> None:
    if not 0 <= label < len(classes):
        raise InputError(f"'{file}' has a label beyond the {len(classes)} classes of the release")
