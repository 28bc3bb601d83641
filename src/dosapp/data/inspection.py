"""What a dataset holds: counts, sizes, broken files, duplicates, imbalance, a contact sheet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from dosapp.data.base import Dataset, ImageSource
from dosapp.errors import InputError
from dosapp.runtime.extras import missing_extra

HASH_DISTANCE = 2  # bits of 64 in which the perceptual hashes of duplicates may differ
COLOR_DISTANCE = 12.0  # of 255 by which their mean colours may differ
CHUNK = 2048  # images compared with all others at a time
IMBALANCED = 5.0  # largest class / smallest class from which a note is given
SMALL = 32  # pixels of the shorter side below which an image is called small
THUMBNAIL, SHEET_COLUMNS, SHEET_ROWS, CAPTION = 96, 8, 40, 200


@dataclass(frozen=True)
class InspectedImage:
    """An image that could be read."""

    name: str
    split: str  # train or test
    label: int
    size: tuple[int, int]  # width, height
    hash: np.ndarray[Any, Any]  # 64 bits
    color: np.ndarray[Any, Any]  # mean, RGB
    thumbnail: Image.Image


@dataclass(frozen=True)
class Inspection:
    """What was found in a dataset."""

    name: str
    classes: tuple[str, ...]
    images: tuple[InspectedImage, ...]
    broken: tuple[str, ...]  # a sentence each
    duplicates: tuple[tuple[InspectedImage, ...], ...]  # groups of images that look the same

    def counts(self) -> dict[str, dict[str, int]]:
        """Readable images by class and split."""
        counts = {name: {"train": 0, "test": 0} for name in self.classes}
        for image in self.images:
            counts[self.classes[image.label]][image.split] += 1
        return counts

    @property
    def imbalance(self) -> float:
        """Training images of the largest class for each of the smallest."""
        sizes = [count["train"] for count in self.counts().values()]
        return max(sizes) / max(1, min(sizes))

    def sides(self) -> list[int]:
        """The shorter side of every image, sorted."""
        return sorted(min(image.size) for image in self.images)

    def leaks(self) -> list[tuple[InspectedImage, ...]]:
        """Duplicates of which one trains and another is tested."""
        return [group for group in self.duplicates if len({image.split for image in group}) > 1]

    def conflicts(self) -> list[tuple[InspectedImage, ...]]:
        """Duplicates with different labels."""
        return [group for group in self.duplicates if len({image.label for image in group}) > 1]

    def notes(self) -> list[str]:
        """What to change before training."""
        notes = []
        if self.broken:
            notes.append(f"{len(self.broken)} unreadable: replace them, or use --skip-bad-images")
        if self.leaks():
            notes.append("duplicates in train and test: the accuracy will be too high; remove one")
        if self.conflicts():
            notes.append("duplicates with different labels: one of the labels is wrong")
        if self.imbalance >= IMBALANCED:
            notes.append(f"the largest class has {self.imbalance:.0f} times the smallest's images")
        few = [name for name, count in self.counts().items() if count["train"] < 5]
        if few:
            notes.append(f"fewer than 5 training images: {', '.join(few[:5])}")
        small = sum(side < SMALL for side in self.sides())
        if small:
            notes.append(f"images with a side below {SMALL} pixels: {small}")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON."""

        def names(groups: Sequence[tuple[InspectedImage, ...]]) -> list[list[str]]:
            return [[image.name for image in group] for group in groups]

        sides = self.sides()
        return {
            "name": self.name,
            "classes": self.counts(),
            "images": len(self.images),
            "shorter_side": {
                "min": sides[0],
                "median": sides[len(sides) // 2],
                "max": sides[-1],
            },
            "broken": list(self.broken),
            "duplicates": names(self.duplicates),
            "across_train_and_test": names(self.leaks()),
            "across_classes": names(self.conflicts()),
            "imbalance": round(self.imbalance, 2),
            "notes": self.notes(),
        }


def inspect_dataset(
    dataset: Dataset[ImageSource], on_image: Callable[[], None] = lambda: None
) -> Inspection:
    """Read every image of a dataset once.

    Args:
        dataset: Images as they are stored.
        on_image: Called after each image.

    Returns:
        What was found; duplicates are found by perceptual hash.

    Raises:
        InputError: The extra `inspect` is missing, or no image can be read.
    """
    try:
        import imagehash
    except ImportError as error:
        raise missing_extra("inspecting data", "inspect", error) from error
    found: list[InspectedImage] = []
    broken: list[str] = []
    for split, part in (("train", dataset.train), ("test", dataset.test)):
        for row, label in enumerate(part.labels.tolist()):
            try:
                image = part.images.open(row)
                name = part.images.key(row).rpartition(":")[0]
            except InputError as error:
                broken.append(str(error))
                continue
            finally:
                on_image()
            bits = imagehash.phash(image).hash.flatten()
            color = np.asarray(image.resize((1, 1), Image.Resampling.BOX), dtype=np.float64)
            thumbnail = ImageOps.fit(image, (THUMBNAIL, THUMBNAIL))
            found.append(
                InspectedImage(name, split, label, image.size, bits, color.reshape(3), thumbnail)
            )
    if not found:
        raise InputError(f"no image of {dataset.name} can be read; the first: {broken[0]}")
    groups = _group_duplicates(found)
    return Inspection(dataset.name, dataset.classes, tuple(found), tuple(broken), groups)


def _group_duplicates(images: list[InspectedImage]) -> tuple[tuple[InspectedImage, ...], ...]:
    """Groups of images that are equal up to compression and size."""
    bits = np.stack([np.where(image.hash, 1.0, -1.0) for image in images]).astype(np.float32)
    colors = np.stack([image.color for image in images])
    group = list(range(len(images)))  # the first image of each image's group
    for start in range(0, len(images), CHUNK):
        close = bits[start : start + CHUNK] @ bits.T >= bits.shape[1] - 2 * HASH_DISTANCE
        for row, other in zip(*np.nonzero(close), strict=True):
            first = start + int(row)
            difference = np.abs(colors[first] - colors[other]).max()
            if first < other and difference <= COLOR_DISTANCE:
                group[other] = min(group[other], group[first])
    members: dict[int, list[InspectedImage]] = {}
    for image, first in zip(images, group, strict=True):
        members.setdefault(first, []).append(image)
    return tuple(tuple(found) for found in members.values() if len(found) > 1)


def draw_contact_sheet(inspection: Inspection) -> Image.Image:
    """Draw the first images of each class in a row beside its name."""
    font, gap = ImageFont.load_default(15), 4
    classes = inspection.classes[:SHEET_ROWS]
    width, height = CAPTION + SHEET_COLUMNS * (THUMBNAIL + gap), len(classes) * (THUMBNAIL + gap)
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (name, count) in enumerate(list(inspection.counts().items())[:SHEET_ROWS]):
        top = row * (THUMBNAIL + gap)
        title = name if len(name) <= 24 else name[:23] + "…"
        draw.text((8, top + 28), title, "black", font)
        draw.text((8, top + 50), f"{count['train']} train, {count['test']} test", "dimgrey", font)
        shown = [image for image in inspection.images if image.label == row][:SHEET_COLUMNS]
        for column, image in enumerate(shown):
            sheet.paste(image.thumbnail, (CAPTION + column * (THUMBNAIL + gap), top))
    return sheet
