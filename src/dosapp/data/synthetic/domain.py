"""Generated domains: compositions in three parts (pretraining, benchmark, control), drawn anew."""

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

Draw = Callable[[list[str], int, Style, torch.Generator], Tensor]


@dataclass(frozen=True)
class Domain:
    """A world of compositions: the `pretraining_style` look pretrains, the `field` look is the benchmark."""

    name: str
    description: str
    compositions: list[str]
    draw: Draw
    pretraining: int
    benchmark: int
    control: int
    pretraining_style: Style
    benchmark_style: Style

    @cached_property
    def shuffled(self) -> list[str]:
        """Fixed once for all: the parts must be the same on every machine and for every seed."""
        names = list(self.compositions)
        random.Random(self.name).shuffle(names)
        return names

    @property
    def pretraining_names(self) -> list[str]:
        return self.shuffled[self.benchmark + self.control :][: self.pretraining]

    @property
    def benchmark_names(self) -> list[str]:
        return self.shuffled[: self.benchmark]

    @property
    def control_names(self) -> list[str]:
        return self.shuffled[self.benchmark : self.benchmark + self.control]

    def dataset(self, pixels: int, *, train: int = 40, test: int = 40) -> Dataset[ImageArray]:
        """The benchmark with so many pictures per class, the same for every seed of a run."""
        names, control = self.benchmark_names, self.control_names
        return Dataset(
            name=self.name,
            classes=tuple(names),
            train=self._part(names, train, pixels, "train"),
            test=self._part(names, test, pixels, "test"),
            prompts=Prompts(),
            control=ControlSet(tuple(control), self._part(control, 10, pixels, "control")),
        )

    def _part(self, names: list[str], count: int, pixels: int, split: str) -> Split[ImageArray]:
        key = (self.name, split, count, pixels)
        if key not in _DRAWN:
            _DRAWN[key] = self._drawn(names, count, pixels, split)
        return _DRAWN[key]

    def _drawn(self, names: list[str], count: int, pixels: int, split: str) -> Split[ImageArray]:
        labels = np.repeat(np.arange(len(names)), count)
        seed = torch_rng(self.name, split)
        pictures = self.draw([names[i] for i in labels], pixels, self.benchmark_style, seed)
        look = hashlib.sha256(pictures.numpy().data).hexdigest()[:8]  # a new look, a new stream
        return Split(InMemoryImages(pictures, f"{self.name}-{pixels}px-{look}/{split}"), labels)


_DRAWN: dict[
    tuple[str, str, int, int], Split[ImageArray]
] = {}  # drawing takes seconds, and never differs
