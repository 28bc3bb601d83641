"""The paper's five datasets by name; class names, orders and prompts are YAML files in this folder.

Images come from a local copy (`--data-dir`: the official release, class folders, or a tar of them)
or, without one, from the hub through the `datasets` package. Data with other classes than the
release is an error; another number of images is a warning. To add a dataset: NAME.yaml here and a
reader of its release in release_readers.py.
"""

import hashlib
import random
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dosapp.data.base import Dataset, ImageSource, Prompts, Split
from dosapp.data.files import FileImages, list_files
from dosapp.data.folder import find_images, make_split, read_class_names
from dosapp.data.paper_sets.release_readers import READERS, normalize_name
from dosapp.errors import InputError

FOLDER = Path(__file__).parent
PAPER_DATASETS = tuple(sorted(file.stem for file in FOLDER.glob("*.yaml")))
MAX_LISTED = 3  # classes named in one message


@dataclass(frozen=True)
class PaperDataset:
    """What is known of a dataset before any image is read.

    Example:
        >>> len(PaperDataset.from_name("gtsrb").classes)
        43
    """

    name: str
    description: str
    order_seed: int
    train_template: str
    evaluation_templates: Sequence[str]
    images: Mapping[str, int]  # split → number of images in the official release
    hub: Mapping[str, Any]
    classes: Sequence[str]  # in the label order of the release
    aliases: Sequence[str] = ()  # other names of the classes, in the same order
    copies: Sequence[Mapping[str, Any]] = ()  # known copies other than the release

    @classmethod
    def from_name(cls, name: str) -> "PaperDataset":
        """Read the description of one of `PAPER_DATASETS`."""
        return cls(name, **yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))

    @property
    def order(self) -> tuple[str, ...]:
        """Class names in the order in which they are learned, the same for every seed."""
        names = list(self.classes)
        random.Random(self.order_seed).shuffle(names)
        return tuple(names)

    def match_classes(self, names: Sequence[str], where: str) -> dict[str, str]:
        """Map folder or file names to class names: by number, by name or by alias.

        Raises:
            InputError: A name belongs to no class; `where` tells its origin.
        """
        if all(re.fullmatch(r"\d+", name) for name in names):
            numbers = {name: int(name) for name in names}
            wrong = next((name for name, n in numbers.items() if n >= len(self.classes)), None)
            if wrong is not None:
                raise InputError(
                    f"'{where}' has a class '{wrong}'; {self.name} has {len(self.classes)}"
                )
            return {name: self.classes[number] for name, number in numbers.items()}
        by_name = {normalize_name(name): name for name in self.classes}
        pairs = zip(self.aliases, self.classes, strict=bool(self.aliases))
        by_name |= {normalize_name(alias): name for alias, name in pairs}
        for name in names:
            if normalize_name(name) not in by_name:
                raise InputError(f"'{where}' has a class '{name}', which {self.name} does not have")
        return {name: by_name[normalize_name(name)] for name in names}

    def check_names(self, names: Sequence[str], where: str) -> None:
        """Raise an `InputError` if names that came with numbered folders are not the release's."""
        expected = [{normalize_name(name)} for name in self.classes]
        for n, alias in enumerate(self.aliases):
            expected[n].add(normalize_name(alias))
        differing = [
            n
            for n, name in enumerate(names)
            if n >= len(expected) or normalize_name(name) not in expected[n]
        ]
        if differing:
            n = differing[0]
            own = f"'{self.classes[n]}'" if n < len(expected) else "missing"
            raise InputError(
                f"'{where}' is not {self.name}: {len(differing)} of its {len(names)} classes "
                f"differ, for example class {n} is '{names[n]}' in its classes.json and {own} in "
                f"{self.name}"
            )

    def build_dataset(
        self, train: Split[ImageSource], test: Split[ImageSource], where: str
    ) -> Dataset[ImageSource]:
        """Compare two splits with the release and order their classes as they are learned.

        Args:
            train: Training images; labels are indices of `classes`.
            test: Test images.
            where: Where the images come from, for messages.

        Returns:
            The dataset.

        Raises:
            InputError: A class has no images, or the files are those of another dataset.
        """
        self._check_other_datasets(train, test, where)
        for name, split in (("train", train), ("test", test)):
            self._check_counts(name, split, where)
        self._compare_with_copies(train, test, where)
        index = {name: n for n, name in enumerate(self.order)}
        learned = np.array([index[name] for name in self.classes])  # release label → class index
        return Dataset(
            self.name,
            self.order,
            Split(train.images, learned[train.labels]),
            Split(test.images, learned[test.labels]),
            Prompts(self.train_template, tuple(self.evaluation_templates)),
        )

    def _check_counts(self, name: str, split: Split[ImageSource], where: str) -> None:
        counts = np.bincount(split.labels, minlength=len(self.classes))
        missing = [f"'{self.classes[n]}'" for n in np.flatnonzero(counts == 0).tolist()]
        if missing:
            more = f" and {len(missing) - MAX_LISTED} more" if len(missing) > MAX_LISTED else ""
            raise InputError(
                f"'{where}' has no {name} images of {len(missing)} of {self.name}'s "
                f"{len(self.classes)} classes: {', '.join(missing[:MAX_LISTED])}{more}"
            )
        if len(split.labels) != self.images[name]:
            smallest = self.classes[int(counts.argmin())]
            warnings.warn(
                f"'{where}' has {len(split.labels)} {name} images (the fewest, "
                f"{counts.min()}, of '{smallest}') and the release of {self.name} has "
                f"{self.images[name]}; results cannot be compared with published ones",
                stacklevel=4,
            )

    def _check_other_datasets(
        self, train: Split[ImageSource], test: Split[ImageSource], where: str
    ) -> None:
        """Refuse a known copy of another dataset: numbered folders fit every dataset."""
        checksum = hash_file_names(train, test)
        for name in PAPER_DATASETS:
            for copy in PaperDataset.from_name(name).copies if name != self.name else ():
                if checksum == copy["files"]:
                    raise InputError(f"'{where}' is {name} ({copy['name']}), not {self.name}")

    def _compare_with_copies(
        self, train: Split[ImageSource], test: Split[ImageSource], where: str
    ) -> None:
        """Warn about data that resembles a known copy but differs from it in some classes."""
        checksum, classes = hash_file_names(train, test), hash_class_files(train, test)
        sizes = (len(train.labels), len(test.labels))
        for copy in self.copies:
            if checksum in ("", copy["files"]):
                continue
            known = copy["per_class"].split()
            pairs = enumerate(zip(classes, known, strict=False))
            differing = [n for n, (own, expected) in pairs if own != expected]
            if sizes == (copy["train"], copy["test"]) or len(differing) <= len(known) / 2:
                listed = [
                    self._describe_difference(n, classes[n], known[n])
                    for n in differing[:MAX_LISTED]
                ]
                rest = len(differing) - MAX_LISTED
                more = f", and {rest} more classes" if rest > 0 else ""
                warnings.warn(
                    f"'{where}' is not quite {copy['name']}: {', '.join(listed)}{more}",
                    stacklevel=4,
                )

    def _describe_difference(self, n: int, own: str, expected: str) -> str:
        counts, known = (text.partition(":")[0].split("+") for text in (own, expected))
        name = f"class '{self.classes[n]}' has"
        if counts == known:
            return f"{name} other files"
        return (
            f"{name} {counts[0]} train and {counts[1]} test images, not {known[0]} and {known[1]}"
        )


def hash_file_names(train: Split[ImageSource], test: Split[ImageSource]) -> str:
    """Hash all file names with their labels, without their folders; empty without files."""
    lines = _list_file_names(train, test)
    return _hash_lines([line for _, line in lines])[:16] if lines else ""


def hash_class_files(train: Split[ImageSource], test: Split[ImageSource]) -> list[str]:
    """The same for each class, after its numbers of images: `30+20:1f00ba`."""
    lines: dict[int, list[str]] = {}
    for label, line in _list_file_names(train, test):
        lines.setdefault(label, []).append(line)
    train_counts, test_counts = (np.bincount(split.labels) for split in (train, test))
    return [
        f"{train_counts[n]}+{test_counts[n]}:{_hash_lines(lines[n])[:6]}" for n in sorted(lines)
    ]


def _list_file_names(train: Split[ImageSource], test: Split[ImageSource]) -> list[tuple[int, str]]:
    lines = []
    for part, split in (("train", train), ("test", test)):
        if not isinstance(split.images, FileImages):
            return []
        names = [Path(file.member or file.path).name for file in split.images.files]
        pairs = zip(split.labels, names, strict=True)
        lines += [(int(label), f"{part} {label} {name}") for label, name in pairs]
    return lines


def _hash_lines(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def load_local_copy(name: str, path: Path) -> Dataset[ImageSource]:
    """Load one of the paper's datasets from disk.

    Args:
        name: One of `PAPER_DATASETS`.
        path: The copy, or a folder that holds NAME or NAME.tar.

    Returns:
        The dataset.

    Raises:
        InputError: The copy is missing, incomplete, or of another dataset.
    """
    paper = PaperDataset.from_name(name)
    if not path.exists():
        raise InputError(f"data folder '{path}' does not exist; --data-dir takes a copy of {name}")
    path = next((p for p in (path / f"{name}.tar", path / name) if p.exists()), path)
    files = list_files(path) if path.is_dir() or path.suffix == ".tar" else {}
    read_release = READERS[name]
    try:
        release = read_release(files, paper.classes)
    except (KeyError, ValueError, IndexError) as error:
        raise InputError(
            f"'{path}' looks like the release of {name}, but something is missing in it ({error})"
        ) from error
    if release is not None:
        return paper.build_dataset(*release, str(path))
    train_files, test_files = find_images(path)
    if (names := read_class_names(files)) is not None:
        paper.check_names(names, str(path))
    labels = sorted({label for _, label in train_files + test_files})
    class_of = paper.match_classes(labels, str(path))
    root = path if path.is_dir() else path.parent
    train, test = (
        make_split([(file, class_of[label]) for file, label in part], paper.classes, root)
        for part in (train_files, test_files)
    )
    return paper.build_dataset(train, test, str(path))


def describe_datasets() -> dict[str, dict[str, Any]]:
    """Describe the paper's datasets for `dosapp datasets`."""
    papers = [PaperDataset.from_name(name) for name in PAPER_DATASETS]
    return {
        paper.name: {
            "classes": len(paper.classes),
            "idea": paper.description,
            "images": dict(paper.images),
            "hub": dict(paper.hub),
        }
        for paper in papers
    }
