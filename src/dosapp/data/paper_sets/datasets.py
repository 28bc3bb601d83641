"""The paper's five datasets, by name: class names, orders and prompts are files in `sets/`.

ImageArray come from a local copy (`--data-dir`: the official release, class folders, or a tar of
them) or, without one, from the hub through the `datasets` package. What is found is held to what
the release has: other classes are an error, another number of pictures is a note.
"""

import hashlib
import json
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
from dosapp.data.files import FileImages, FileTree, list_files
from dosapp.data.folder import find_images, make_split
from dosapp.data.paper_sets.releases import RELEASES, plain
from dosapp.errors import InputError

SETS = Path(__file__).parent
PAPER_DATASETS = tuple(sorted(file.stem for file in SETS.glob("*.yaml")))


@dataclass(frozen=True)
class PaperDataset:
    name: str
    description: str
    shuffle: int
    caption: str
    templates: Sequence[str]
    images: Mapping[str, int]
    hub: Mapping[str, Any]
    classes: Sequence[str]
    aliases: Sequence[str] = ()  # the same classes by other names
    copies: Sequence[Mapping[str, Any]] = ()  # others than the release: what files they have

    @classmethod
    def named(cls, name: str) -> "PaperDataset":
        return cls(name, **yaml.safe_load((SETS / f"{name}.yaml").read_text()))

    @property
    def order(self) -> tuple[str, ...]:
        """Class names in the order in which they are taught, the same for every seed."""
        names = list(self.classes)
        random.Random(self.shuffle).shuffle(names)
        return tuple(names)

    def labels(self, found: Sequence[str], where: str) -> dict[str, str]:
        """Folder or file names → class names: by number, by name, or by the release's own name."""
        if all(re.fullmatch(r"\d+", name) for name in found):
            numbers = {name: int(name) for name in found}
            wrong = next((n for n, i in numbers.items() if i >= len(self.classes)), None)
            if wrong is not None:
                raise InputError(
                    f"'{where}' has a class '{wrong}'; {self.name} has {len(self.classes)}"
                )
            return {name: self.classes[number] for name, number in numbers.items()}
        known = {plain(name): name for name in self.classes}
        known |= {
            plain(a): b for a, b in zip(self.aliases, self.classes, strict=bool(self.aliases))
        }
        for name in found:
            if plain(name) not in known:
                raise InputError(f"'{where}' has a class '{name}', which {self.name} does not have")
        return {name: known[plain(name)] for name in found}

    def check_names(self, names: Sequence[str], where: str) -> None:
        """Names that come with numbered folders are the release's, or this is something else."""
        ours = [{plain(name)} for name in self.classes]
        for n, other in enumerate(self.aliases):
            ours[n].add(plain(other))
        differ = [n for n, name in enumerate(names) if n >= len(ours) or plain(name) not in ours[n]]
        if differ:
            n = differ[0]
            here = f"'{self.classes[n]}'" if n < len(ours) else "not there"
            raise InputError(
                f"'{where}' is not {self.name}: {len(differ)} of its {len(names)} classes differ, "
                f"for example class {n} is '{names[n]}' in its classes.json and {here} in "
                f"{self.name}"
            )

    def dataset(
        self, train: Split[ImageSource], test: Split[ImageSource], where: str
    ) -> Dataset[ImageSource]:
        """Settings against the release, with classes in the order in which they are taught."""
        self._check_stranger(train, test, where)
        for split, have in (("train", train), ("test", test)):
            counts = np.bincount(have.labels, minlength=len(self.classes))
            missing = [f"'{name}'" for name, n in zip(self.classes, counts, strict=True) if not n]
            if missing:
                more = f" and {len(missing) - SAID} more" if len(missing) > SAID else ""
                raise InputError(
                    f"'{where}' has no {split} pictures of {len(missing)} of {self.name}'s "
                    f"{len(self.classes)} classes: {', '.join(missing[:SAID])}{more}"
                )
            if len(have.labels) != self.images[split]:
                fewest = self.classes[int(counts.argmin())]
                warnings.warn(
                    f"'{where}' has {len(have.labels)} {split} pictures (the fewest, "
                    f"{counts.min()}, of '{fewest}') and the release of {self.name} has "
                    f"{self.images[split]}; results cannot be compared with published ones",
                    stacklevel=3,
                )
        self._check_list(train, test, where)
        place = {name: n for n, name in enumerate(self.order)}
        taught = np.array([place[name] for name in self.classes])
        return Dataset(
            self.name,
            self.order,
            Split(train.images, taught[train.labels]),
            Split(test.images, taught[test.labels]),
            Prompts(self.caption, tuple(self.templates)),
        )

    def _check_stranger(
        self, train: Split[ImageSource], test: Split[ImageSource], where: str
    ) -> None:
        """Numbered folders fit any dataset; a copy we know by its files fits its own."""
        found = file_list(train, test)
        for other in (PaperDataset.named(name) for name in PAPER_DATASETS if name != self.name):
            for copy in other.copies:
                if found == copy["files"]:
                    raise InputError(f"'{where}' is {other.name} ({copy['name']}), not {self.name}")

    def _check_list(self, train: Split[ImageSource], test: Split[ImageSource], where: str) -> None:
        """Almost a copy we know, or as many pictures but other files: say what differs."""
        files, found = file_list(train, test), class_lists(train, test)
        have = (len(train.labels), len(test.labels))
        for copy in self.copies:
            if files in ("", copy["files"]):
                continue
            known = copy["each"].split()
            differ = [
                n for n, pair in enumerate(zip(found, known, strict=False)) if len({*pair}) > 1
            ]
            if have == (copy["train"], copy["test"]) or len(differ) <= len(known) / 2:
                said = [self._differs(n, found[n], known[n]) for n in differ[:SAID]]
                more = f", and {len(differ) - SAID} more classes" if len(differ) > SAID else ""
                warnings.warn(
                    f"'{where}' is not quite {copy['name']}: {', '.join(said)}{more}", stacklevel=4
                )

    def _differs(self, number: int, found: str, known: str) -> str:
        have, want = (text.partition(":")[0].split("+") for text in (found, known))
        name = f"class '{self.classes[number]}' has"
        if have == want:
            return f"{name} other files"
        return f"{name} {have[0]} train and {have[1]} test pictures, not {want[0]} and {want[1]}"


SAID = 3  # differences in one sentence


def file_list(train: Split[ImageSource], test: Split[ImageSource]) -> str:
    """A checksum of which files have which labels, whatever folders they are in; empty if the
    pictures are not files."""
    lines = _lines(train, test)
    return _checksum([line for _, line in lines])[:16] if lines else ""


def class_lists(train: Split[ImageSource], test: Split[ImageSource]) -> list[str]:
    """The same for each class, after its numbers of pictures: `30+20:1f00ba`."""
    lines: dict[int, list[str]] = {}
    for label, line in _lines(train, test):
        lines.setdefault(label, []).append(line)
    taught, asked = (np.bincount(half.labels) for half in (train, test))
    return [f"{taught[n]}+{asked[n]}:{_checksum(lines[n])[:6]}" for n in sorted(lines)]


def _lines(train: Split[ImageSource], test: Split[ImageSource]) -> list[tuple[int, str]]:
    lines = []
    for split, half in (("train", train), ("test", test)):
        if not isinstance(half.images, FileImages):
            return []
        names = [Path(file.member or file.path).name for file in half.images.files]
        lines += [
            (int(n), f"{split} {n} {name}") for n, name in zip(half.labels, names, strict=True)
        ]
    return lines


def _checksum(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def load_local_copy(name: str, place: Path) -> Dataset[ImageSource]:
    """A local copy: `place` itself, or NAME or NAME.tar in it."""
    known = PaperDataset.named(name)
    if not place.exists():
        raise InputError(f"data folder '{place}' does not exist; --data-dir takes a copy of {name}")
    for inside in (place / f"{name}.tar", place / name):
        if inside.exists():
            place = inside
            break
    names = list_files(place) if place.is_dir() or place.suffix == ".tar" else {}
    try:
        released = RELEASES[name](names, known.classes)
    except (KeyError, ValueError, IndexError) as error:
        raise InputError(
            f"'{place}' looks like the release of {name}, but something is missing in it ({error})"
        ) from error
    if released is not None:
        return known.dataset(*released, str(place))
    train, test = find_images(place)
    if (given := class_names(names)) is not None:
        known.check_names(given, str(place))
    said = known.labels(sorted({label for _, label in train + test}), str(place))
    root = place if place.is_dir() else place.parent
    classes = list(known.classes)
    taught, asked = (
        make_split([(picture, said[label]) for picture, label in half], classes, root)
        for half in (train, test)
    )
    return known.dataset(taught, asked, str(place))


def class_names(names: FileTree) -> list[str] | None:
    """Of a `classes.json` that came with the pictures: names in label order."""
    file = next((p for n, p in names.items() if Path(n).name == "classes.json"), None)
    if file is None:
        return None
    try:
        said = json.loads(file.read())
    except ValueError as error:
        raise InputError(f"'{file}' is not JSON ({error})") from error
    if not isinstance(said, list) or not all(isinstance(name, str) for name in said):
        raise InputError(f"'{file}' is not a list of class names in label order")
    return said


def describe_datasets() -> dict[str, dict[str, Any]]:
    """For `dosapp datasets`."""
    found = {}
    for name in PAPER_DATASETS:
        known = PaperDataset.named(name)
        found[name] = {
            "classes": len(known.classes),
            "idea": known.description,
            "images": dict(known.images),
            "hub": dict(known.hub),
        }
    return found
