"""Data of other libraries as a `Dataset`: torch datasets, arrays, tables of `datasets`, paths."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dosapp.data.base import Dataset, ImageArray, Rows, Split
from dosapp.data.cache import cache_dataset
from dosapp.data.folder import train_test_split
from dosapp.data.hub import read_tables
from dosapp.data.images import InMemoryImages
from dosapp.data.inputs import Images, list_images, read_image, stack_images
from dosapp.data.preprocess import Preprocess
from dosapp.data.registry import load_dataset
from dosapp.errors import InputError

FORMS = (
    "a path, a torch Dataset of (image, label) with .classes, images by class name, a pair "
    "(images, labels), or a table of the datasets package"
)


def as_dataset(
    data: Any,
    preprocess: Preprocess,
    *,
    test: Any = None,
    classes: Sequence[str] | None = None,
    name: str = "data",
    hold_out: bool = True,
) -> Dataset[ImageArray]:
    """Convert labelled images of any usual form to a dataset.

    Images of torch datasets, arrays and mappings are held in memory at the backbone's size.

    Args:
        data: A name or path as `load_dataset` takes it, a torch `Dataset` whose items are (image,
            label), images by class name, a pair (images, labels), a `Dataset` or `DatasetDict` of
            the `datasets` package, or a `Dataset` of dosapp, which is returned as it is.
        preprocess: Resize and crop of the backbone that will see the images.
        test: Test images in one of these forms.
        classes: Class names in label order, where labels are numbers without names.
        name: How results call the data.
        hold_out: Make a third of each class the test split where there is none; otherwise the test
            split is empty.

    Returns:
        The dataset.

    Raises:
        InputError: The data has another form, labels without names, or an image that is none.

    Example:
        >>> preprocess = Preprocess(32, {"shortest_edge": 32}, 3)
        >>> images = np.zeros((6, 48, 48, 3), dtype=np.uint8)
        >>> as_dataset((images, [0, 0, 0, 1, 1, 1]), preprocess, classes=["fox", "owl"]).classes
        ('fox', 'owl')
    """
    if test is None:
        return _convert(data, preprocess, classes, name, hold_out)
    train_part = _convert(data, preprocess, classes, name, hold_out=False)
    test_part = _convert(test, preprocess, classes, name, hold_out=False)
    unknown = next((c for c in test_part.classes if c not in train_part.classes), None)
    if unknown is not None:
        raise InputError(f"the test images have the class '{unknown}', which has no training image")
    index = np.array([train_part.classes.index(c) for c in test_part.classes], dtype=np.int64)
    split = test_part.train
    return replace(train_part, test=Split(split.images, index[split.labels], split.skipped))


def _convert(
    data: Any, preprocess: Preprocess, classes: Sequence[str] | None, name: str, hold_out: bool
) -> Dataset[ImageArray]:
    if isinstance(data, Dataset):
        return data
    if isinstance(data, (str, Path)):
        return load_dataset(data, preprocess, hold_out=hold_out)
    if _is_table(data) or (isinstance(data, Mapping) and any(map(_is_table, data.values()))):
        return cache_dataset(read_tables(data, name, hold_out), preprocess)
    if isinstance(data, Mapping):
        labelled = LabelledPixels.from_mapping(data, preprocess)
    elif isinstance(data, tuple) and len(data) == 2:
        labelled = LabelledPixels.from_pair(*data, preprocess, classes)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        labelled = LabelledPixels.from_torch(data, preprocess, classes)
    else:
        raise InputError(f"data is a {type(data).__name__}; give {FORMS}")
    return labelled.make_dataset(name, hold_out)


def _is_table(data: Any) -> bool:
    """Whether this is a `datasets.Dataset`; the package need not be installed to know."""
    return hasattr(data, "features") and hasattr(data, "cast_column")


@dataclass(frozen=True)
class LabelledPixels:
    """Images in memory with their labels."""

    classes: tuple[str, ...]
    pixels: Tensor  # uint8 [N, 3, H, W]
    labels: Rows  # [N]

    @classmethod
    def from_mapping(cls, data: Mapping[str, Images], preprocess: Preprocess) -> "LabelledPixels":
        """From images by class name."""
        parts = {str(name): stack_images(images, preprocess) for name, images in data.items()}
        size = preprocess.image_size
        for name, part in parts.items():
            if part.dtype != torch.uint8 or part.shape[1:] != (3, size, size):
                raise InputError(
                    f"images of '{name}' are {part.dtype} {list(part.shape)}; give uint8 "
                    f"[n, 3, {size}, {size}], Pillow images, paths or numpy arrays"
                )
        if not parts:
            raise InputError("there are no classes in the data; give images by class name")
        labels = np.repeat(np.arange(len(parts)), [len(part) for part in parts.values()])
        return cls(tuple(parts), torch.cat(list(parts.values())), labels)

    @classmethod
    def from_pair(
        cls, images: Images, labels: Any, preprocess: Preprocess, classes: Sequence[str] | None
    ) -> "LabelledPixels":
        """From images and as many labels: class names, or numbers with `classes`."""
        listed, values = list_images(images), np.asarray(labels).tolist()
        if not isinstance(values, list) or len(values) != len(listed):
            count = len(values) if isinstance(values, list) else 1
            raise InputError(
                f"there are {len(listed)} images and {count} labels; give one for each"
            )
        names, rows = _name_labels(values, classes)
        pixels = torch.stack([read_image(image, preprocess) for image in listed])
        return cls(names, pixels, rows)

    @classmethod
    def from_torch(
        cls, data: Any, preprocess: Preprocess, classes: Sequence[str] | None
    ) -> "LabelledPixels":
        """From a torch dataset whose items are (image, label), read once."""
        if not len(data):
            raise InputError("the dataset is empty; give at least two images of each class")
        pixels, values = [], []
        for row in range(len(data)):
            item = data[row]
            if not isinstance(item, (tuple, list)) or len(item) < 2:
                kind = type(item).__name__
                raise InputError(f"item {row} of the dataset is a {kind}; give (image, label)")
            pixels.append(read_image(item[0], preprocess))
            values.append(int(item[1]) if isinstance(item[1], (Tensor, np.integer)) else item[1])
        inner = data
        while classes is None and inner is not None:  # a Subset has the dataset in it
            classes, inner = getattr(inner, "classes", None), getattr(inner, "dataset", None)
        names, rows = _name_labels(values, classes)
        return cls(names, torch.stack(pixels), rows)

    def make_dataset(self, name: str, hold_out: bool) -> Dataset[ImageArray]:
        """Train on these images, or on two thirds of each class."""
        rows = np.arange(len(self.labels))
        train, test = rows, rows[:0]
        if hold_out:
            split = train_test_split([self.classes[label] for label in self.labels])
            train, test = (np.array(part, dtype=np.int64) for part in split)
        return Dataset(name, self.classes, self._split(name, train), self._split(name, test))

    def _split(self, name: str, rows: Rows) -> Split[ImageArray]:
        pixels = self.pixels[torch.from_numpy(rows)]
        digest = hashlib.sha256(pixels.numpy().tobytes()).hexdigest()[:12]
        return Split(InMemoryImages(pixels, f"{name}:{digest}"), self.labels[rows])


def _name_labels(values: list[Any], classes: Sequence[str] | None) -> tuple[tuple[str, ...], Rows]:
    """Class names, and labels as their indices."""
    if all(isinstance(value, str) for value in values):
        names = list(classes) if classes is not None else sorted(set(values))
        unknown = next((value for value in values if value not in names), None)
        if unknown is not None:
            raise InputError(f"the label '{unknown}' is not in classes; add it there")
        return _titles(names), np.array([names.index(value) for value in values], dtype=np.int64)
    if classes is None:
        raise InputError(
            f"labels are numbers ({values[0]}, …) without names, which CLIP needs; give "
            "classes=[…] in label order"
        )
    rows = np.array(values, dtype=np.int64)
    wrong = rows[(rows < 0) | (rows >= len(classes))]
    if len(wrong):
        raise InputError(f"a label is {wrong[0]}, but there are {len(classes)} classes")
    return _titles(classes), rows


def _titles(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(name).replace("_", " ") for name in names)
