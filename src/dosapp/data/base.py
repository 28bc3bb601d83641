"""Datasets: images, labels, class names and the captions of a class.

A loader returns a `Dataset[ImageSource]`: images as they are stored. `cache_dataset` turns it into
a `Dataset[ImageArray]`: images at the backbone's size, as bytes.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dosapp.errors import InputError
from dosapp.runtime.plural import plural

Rows = NDArray[np.int64]


class ImageArray(Protocol):
    """Images at the backbone's size, by row."""

    def __len__(self) -> int: ...

    def read(self, rows: Sequence[int] | Rows) -> Tensor:
        """`uint8 [n, 3, H, W]`."""

    def key(self, row: int) -> str:
        """A name of the image that is the same on every machine, for manifests."""

    def check(self) -> None:
        """Raise an `InputError` if an image cannot be read."""


class ImageSource(Protocol):
    """Images as they are stored, by row: files, members of an archive, cells of a table."""

    def __len__(self) -> int: ...

    def open(self, row: int) -> Image.Image:
        """Decode one image, or raise an `InputError` that names it."""

    def key(self, row: int) -> str:
        """A name of the image and its content that is the same on every machine."""

    def identity(self) -> object:
        """A JSON value that changes when any image may have changed; names the cache file."""

    def subset(self, rows: Sequence[int]) -> "ImageSource":
        """Some of the images."""


I_co = TypeVar("I_co", bound=ImageArray | ImageSource, covariant=True)


@dataclass(frozen=True)
class Split(Generic[I_co]):
    """Labelled images: the training or the test part of a dataset.

    Example:
        >>> images = [np.zeros((32, 32, 3), dtype=np.uint8)] * 2
        >>> Split(images, np.array([0, 1])).skipped
        0
    """

    images: I_co
    labels: Rows  # [N], indices of the dataset's class names
    skipped: int = 0  # unreadable images that were left out on request

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise ValueError(f"{len(self.images)} images but {len(self.labels)} labels")

    def __repr__(self) -> str:
        return f"Split({plural(len(self.labels), 'image')})"


@dataclass(frozen=True)
class Prompts:
    """Captions of a class: one for training, and the templates whose features are averaged.

    Example:
        >>> Prompts("a sketch of a {}.").caption("fox")
        'a sketch of a fox.'
    """

    train: str = "a photo of a {}."
    evaluate: tuple[str, ...] = ("a photo of a {}.",)

    @classmethod
    def from_template(cls, template: str) -> "Prompts":
        """One template for training and evaluation; the default if it is empty."""
        return cls(template, (template,)) if template else cls()

    def caption(self, name: str) -> str:
        """The training caption of a class."""
        return self.train.format(name)


@dataclass(frozen=True)
class ControlSet(Generic[I_co]):
    """Classes that are never trained; zero-shot accuracy on them measures generic knowledge."""

    classes: tuple[str, ...]
    test: Split[I_co]


@dataclass(frozen=True)
class Dataset(Generic[I_co]):
    """Class names with a training and a test split.

    Example:
        >>> from dosapp.data.preprocess import Preprocess
        >>> from dosapp.data.registry import load_dataset
        >>> preprocess = Preprocess(32, {"shortest_edge": 32}, resample=3)
        >>> dataset = load_dataset("shapes", preprocess, train_images=2, test_images=2)
        >>> len(dataset.classes), dataset.train.images.read([0]).shape
        (100, torch.Size([1, 3, 32, 32]))
    """

    name: str
    classes: tuple[str, ...]
    train: Split[I_co]
    test: Split[I_co]
    prompts: Prompts = Prompts()
    control: ControlSet[I_co] | None = None

    def __post_init__(self) -> None:
        check_class_names(self.classes, self.name)


def check_class_names(names: Sequence[str], where: str) -> None:
    """Raise an `InputError` if there are no names, or one is empty, repeated or unprintable."""
    if not names:
        raise InputError(f"{where} has no classes; give a folder with one folder for each class")
    seen: set[str] = set()
    for name in names:
        if not name.strip():
            raise InputError(f"{where} has an empty class name; give every class a name")
        # Joiners and no-break spaces are parts of names, such as those with emoji.
        if any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in name):
            raise InputError(
                f"{where} has the class name {name!r}, which cannot be printed; remove line breaks "
                "and control characters"
            )
        if name in seen:
            raise InputError(f"{where} names the class '{name}' twice; class names must differ")
        seen.add(name)
