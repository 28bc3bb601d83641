"""Generated domains: classes are compositions of words, images are drawn from formulas.

The compositions have three disjoint parts: pretraining of the tiny CLIP, benchmark, control set.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dosapp.data.base import ControlSet, Dataset, ImageArray, Prompts, Split
from dosapp.data.images import InMemoryImages
from dosapp.data.synthetic.drawing import Style
from dosapp.runtime.rng import torch_rng

# (class names, image size, style, generator) → uint8 [N, 3, size, size]
Draw = Callable[[list[str], int, Style, torch.Generator], Tensor]

CONTROL_IMAGES = 10  # per class


@dataclass(frozen=True)
class Domain:
    """Compositions, a function that draws them, and one style for each use."""

    name: str
    description: str
    compositions: list[str]
    draw: Draw
    pretraining: int  # number of classes, as the next two
    benchmark: int
    control: int
    pretraining_style: Style
    benchmark_style: Style
    same_classes_as: str = ""  # name of another domain whose three parts these are

    @cached_property
    def shuffled_names(self) -> list[str]:
        """All compositions, in an order that is the same on every machine and for every seed."""
        names = list(self.compositions)
        random.Random(self.same_classes_as or self.name).shuffle(names)
        return names

    @property
    def pretraining_names(self) -> list[str]:
        """Classes of the images that pretrain the tiny CLIP."""
        return self.shuffled_names[self.benchmark + self.control :][: self.pretraining]

    @property
    def benchmark_names(self) -> list[str]:
        """Classes of the dataset."""
        return self.shuffled_names[: self.benchmark]

    @property
    def control_names(self) -> list[str]:
        """Classes that are never trained."""
        return self.shuffled_names[self.benchmark : self.benchmark + self.control]

    def draw_dataset(
        self, image_size: int, train_images: int = 40, test_images: int = 40
    ) -> Dataset[ImageArray]:
        """Draw the benchmark and its control set. They do not depend on the seed of a run.

        Args:
            image_size: Height and width in pixels.
            train_images: Training images per class.
            test_images: Test images per class.

        Returns:
            The dataset; its images are drawn once in a process.
        """
        names, control = self.benchmark_names, self.control_names
        return Dataset(
            name=self.name,
            classes=tuple(names),
            train=self._cached_split(names, train_images, image_size, "train"),
            test=self._cached_split(names, test_images, image_size, "test"),
            prompts=Prompts(),
            control=ControlSet(
                tuple(control), self._cached_split(control, CONTROL_IMAGES, image_size, "control")
            ),
        )

    def _cached_split(
        self, names: list[str], count: int, image_size: int, split: str
    ) -> Split[ImageArray]:
        key = (self.name, split, count, image_size)
        if key not in _SPLITS:
            _SPLITS[key] = self._draw_split(names, count, image_size, split)
        return _SPLITS[key]

    def _draw_split(
        self, names: list[str], count: int, image_size: int, split: str
    ) -> Split[ImageArray]:
        labels = np.repeat(np.arange(len(names)), count)
        rng = torch_rng(self.name, split)
        pixels = self.draw([names[n] for n in labels], image_size, self.benchmark_style, rng)
        # Part of every image's key: other pixels are another scenario.
        content = hashlib.sha256(pixels.numpy().data).hexdigest()[:8]
        return Split(
            InMemoryImages(pixels, f"{self.name}-{image_size}px-{content}/{split}"), labels
        )


# (domain, split, images per class, image size) → split; drawing takes seconds.
_SPLITS: dict[tuple[str, str, int, int], Split[ImageArray]] = {}
