"""The paper's five datasets, by name: class names, orders and prompts are files in `sets/`.

Pictures come from a local copy (`--data-dir`: the official release, class folders, or a tar of
them) or, without one, from the hub through the `datasets` package. What is found is held to what
the release has: other classes are an error, another number of pictures is a note.
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

from dosapp.data.base import Dataset, Part, Prompts
from dosapp.data.files import Files, Prepare, tree
from dosapp.data.folder import found_in, part
from dosapp.data.releases import RELEASES, plain
from dosapp.errors import BadInput

SETS = Path(__file__).parent / "sets"
KNOWN = tuple(sorted(file.stem for file in SETS.glob("*.yaml")))


@dataclass(frozen=True)
class Known:
    name: str
    idea: str
    shuffle: int
    caption: str
    templates: Sequence[str]
    images: Mapping[str, int]
    hub: Mapping[str, Any]
    classes: Sequence[str]
    also: Sequence[str] = ()  # the same classes by other names
    copies: Sequence[Mapping[str, Any]] = ()  # others than the release: counts and their file list

    @classmethod
    def named(cls, name: str) -> "Known":
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
                raise BadInput(
                    f"'{where}' has a class '{wrong}'; {self.name} has {len(self.classes)}"
                )
            return {name: self.classes[number] for name, number in numbers.items()}
        known = {plain(name): name for name in self.classes}
        known |= {plain(a): b for a, b in zip(self.also, self.classes, strict=bool(self.also))}
        for name in found:
            if plain(name) not in known:
                raise BadInput(f"'{where}' has a class '{name}', which {self.name} does not have")
        return {name: known[plain(name)] for name in found}

    def dataset(self, train: Part, test: Part, where: str) -> Dataset:
        """Checked against the release, with classes in the order in which they are taught."""
        for split, have in (("train", train), ("test", test)):
            missing = sorted(set(range(len(self.classes))) - set(have.labels.tolist()))
            if missing:
                raise BadInput(
                    f"'{where}' has no {split} pictures of {len(missing)} of {self.name}'s "
                    f"{len(self.classes)} classes, for example '{self.classes[missing[0]]}'"
                )
            if len(have.labels) != self.images[split]:
                warnings.warn(
                    f"'{where}' has {len(have.labels)} {split} pictures and the release of "
                    f"{self.name} has {self.images[split]}; results cannot be compared with "
                    "published ones",
                    stacklevel=3,
                )
        self._check_list(train, test, where)
        place = {name: n for n, name in enumerate(self.order)}
        taught = np.array([place[name] for name in self.classes])
        return Dataset(
            self.name,
            self.order,
            Part(train.pictures, taught[train.labels]),
            Part(test.pictures, taught[test.labels]),
            Prompts(self.caption, tuple(self.templates)),
        )

    def _check_list(self, train: Part, test: Part, where: str) -> None:
        """As many pictures as a copy we know, but other files: say so."""
        have = (len(train.labels), len(test.labels))
        for copy in self.copies:
            if have == (copy["train"], copy["test"]) and file_list(train, test) != copy["files"]:
                warnings.warn(
                    f"'{where}' has as many pictures as {copy['name']}, but other files or labels "
                    f"(their list has checksum {file_list(train, test)}, not {copy['files']})",
                    stacklevel=4,
                )


def file_list(train: Part, test: Part) -> str:
    """A checksum of which files have which labels, whatever folders they are in; empty if the
    pictures are not files."""
    lines = []
    for split, half in (("train", train), ("test", test)):
        if not isinstance(half.pictures, Files):
            return ""
        names = [Path(place.member or place.path).name for place in half.pictures.places]
        lines += [f"{split} {n} {name}" for n, name in zip(half.labels, names, strict=True)]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def known_data(name: str, place: Path, prepare: Prepare) -> Dataset:
    """A local copy: `place` itself, or NAME or NAME.tar in it."""
    known = Known.named(name)
    if not place.exists():
        raise BadInput(f"data folder '{place}' does not exist; --data-dir takes a copy of {name}")
    for inside in (place / f"{name}.tar", place / name):
        if inside.exists():
            place = inside
            break
    names = tree(place) if place.is_dir() or place.suffix == ".tar" else {}
    try:
        released = RELEASES[name](names, known.classes, prepare)
    except (KeyError, ValueError, IndexError) as error:
        raise BadInput(
            f"'{place}' looks like the release of {name}, but something is missing in it ({error})"
        ) from error
    if released is not None:
        return known.dataset(*released, str(place))
    train, test = found_in(place)
    said = known.labels(sorted({label for _, label in train + test}), str(place))
    root = place if place.is_dir() else place.parent
    classes = list(known.classes)
    taught, asked = (
        part([(picture, said[label]) for picture, label in half], classes, root, prepare)
        for half in (train, test)
    )
    return known.dataset(taught, asked, str(place))


def described() -> dict[str, dict[str, Any]]:
    """For `dosapp datasets`."""
    found = {}
    for name in KNOWN:
        known = Known.named(name)
        found[name] = {
            "classes": len(known.classes),
            "idea": known.idea,
            "images": dict(known.images),
            "hub": dict(known.hub),
        }
    return found
