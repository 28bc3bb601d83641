"""What a dataset is: pictures, labels, class names and the words put around them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dosapp.errors import InputError

Rows = NDArray[np.int64]


class ImageArray(Protocol):
    """ImageArray by position, already at the backbone's size."""

    def __len__(self) -> int: ...

    def read(self, rows: Sequence[int] | Rows) -> Tensor:
        """`uint8 [n, 3, H, W]`."""

    def key(self, row: int) -> str:
        """A name for the picture that does not change between machines, for manifests."""

    def check(self) -> None:
        """Make sure that every picture can be read, before anybody relies on it."""


class ImageSource(Protocol):
    """ImageArray as they came, each decoded and resized when it is asked for."""

    def __len__(self) -> int: ...

    def decode(self, row: int) -> Tensor:
        """`uint8 [3, H, W]`; one sentence if it cannot be read."""

    def key(self, row: int) -> str: ...

    def identity(self) -> object:
        """Something JSON can hold that is another when any picture may be another."""

    def subset(self, rows: Sequence[int]) -> "ImageSource": ...


@dataclass(frozen=True)
class Split:
    """LabelledImages pictures: a split of a dataset. Labels are positions in its class names."""

    images: ImageArray
    labels: Rows
    skipped: int = 0  # pictures that could not be read, and were to be skipped

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise ValueError(f"{len(self.images)} pictures but {len(self.labels)} labels")


@dataclass(frozen=True)
class Listing:
    """The same before anything is decoded: what a loader finds."""

    source: ImageSource
    labels: Rows


@dataclass(frozen=True)
class Prompts:
    """The caption of a class in training, and those whose features are averaged in evaluation."""

    train: str = "a photo of a {}."
    evaluate: tuple[str, ...] = ("a photo of a {}.",)

    @classmethod
    def of(cls, caption: str) -> "Prompts":
        """One caption in training and evaluation; without one, the default."""
        return cls(caption, (caption,)) if caption else cls()

    def caption(self, name: str) -> str:
        return self.train.format(name)


@dataclass(frozen=True)
class Dataset:
    """Classes with a training and a test part; `control` holds classes nobody ever trains on."""

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    prompts: Prompts = Prompts()
    control: "Control | None" = None

    def __post_init__(self) -> None:
        check_class_names(self.classes, self.name)


@dataclass(frozen=True)
class Listed:
    """A dataset as a loader finds it."""

    name: str
    classes: tuple[str, ...]
    train: Listing
    test: Listing
    prompts: Prompts = Prompts()


@dataclass(frozen=True)
class Control:
    """A yardstick for generic knowledge: zero-shot accuracy on classes never trained."""

    classes: tuple[str, ...]
    test: Split


def check_class_names(names: Sequence[str], where: str) -> None:
    if not names:
        raise InputError(f"{where} has no classes; give a folder with one folder for each class")
    seen: set[str] = set()
    for name in names:
        if not name.strip():
            raise InputError(
                f"{where} has an empty class name; every class needs a name to be read"
            )
        if name in seen:
            raise InputError(f"{where} names the class '{name}' twice; class names must differ")
        seen.add(name)
