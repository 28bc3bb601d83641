"""Images of one or several arrays in a fixed order, as a learner and an evaluator read them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from dosapp.data.base import ImageArray, Rows, Split
from dosapp.data.prefetch import prefetch
from dosapp.data.preprocess import to_float
from dosapp.runtime.plural import plural
from dosapp.runtime.rng import numpy_rng


@dataclass(frozen=True)
class UnlabelledImages:
    """Images in a fixed order. There is no field for labels, so that none can leak."""

    arrays: tuple[ImageArray, ...]
    items: Rows  # [N, 2]: array, row in it
    noise: float = 0.0  # standard deviation of Gaussian noise
    seed: int = 0  # of the noise

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({plural(len(self), 'image')})"

    def read(self, positions: Sequence[int] | Rows) -> Tensor:
        """`float32 [n, 3, H, W]` in [0, 1], with noise if there is any."""
        items = self.items[np.asarray(positions, dtype=np.int64)]
        if not len(items):
            return torch.zeros(0, 3, 0, 0)
        batch: list[Tensor] = [torch.empty(0)] * len(items)
        for array in np.unique(items[:, 0]):
            rows = np.flatnonzero(items[:, 0] == array)
            images = self.arrays[array].read(items[rows, 1])
            for row, image in zip(rows, images, strict=True):
                batch[row] = image
        pixels = to_float(torch.stack(batch))
        if self.noise:
            keys = [self.arrays[array].key(row) for array, row in items]
            pairs = zip(pixels, keys, strict=True)
            pixels = torch.stack([self._add_noise(image, key) for image, key in pairs])
        return pixels

    def _add_noise(self, image: Tensor, key: str) -> Tensor:
        """An image gets the same noise whenever it is read."""
        noise = numpy_rng("noise", self.seed, key).standard_normal(image.shape, dtype=np.float32)
        return (image + self.noise * torch.from_numpy(noise)).clamp(0, 1)

    def batches(self, size: int, start: int = 0) -> Iterator[Tensor]:
        """One pass in order, from batch `start` on; the last batch may be smaller."""
        rows = (
            np.arange(first, min(first + size, len(self)))
            for first in range(start * size, len(self), size)
        )
        return (pixels for _, pixels in prefetch(rows, self.read))

    def keys(self) -> list[str]:
        """The name of every image, for manifests."""
        return [self.arrays[array].key(int(row)) for array, row in self.items]


@dataclass(frozen=True, repr=False)
class LabelledImages(UnlabelledImages):
    """Images with labels: indices of the class names of their task or session."""

    labels: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @classmethod
    def from_split(cls, split: Split[ImageArray], rows: Rows, labels: Rows) -> "LabelledImages":
        """Some rows of a split, with labels of their own."""
        items = np.stack([np.zeros_like(rows), rows], axis=1)
        return cls((split.images,), items, labels=labels)

    def labelled_keys(self) -> list[tuple[str, int]]:
        """Name and label of every image, for manifests."""
        return list(zip(self.keys(), self.labels.tolist(), strict=True))

    def subset(self, positions: Rows) -> "LabelledImages":
        """The images at these positions, in this order."""
        return replace(self, items=self.items[positions], labels=self.labels[positions])

    def drop_labels(self) -> UnlabelledImages:
        """The same images without labels."""
        return UnlabelledImages(self.arrays, self.items, self.noise, self.seed)

    def empty(self) -> UnlabelledImages:
        """No images, for a session without a stream."""
        return UnlabelledImages(self.arrays, self.items[:0])


def concat_images(parts: Sequence[LabelledImages], offsets: Sequence[int]) -> LabelledImages:
    """Concatenate images; the labels of each part are shifted by its offset."""
    arrays: list[ImageArray] = []
    items, labels = [np.zeros((0, 2), dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for part, offset in zip(parts, offsets, strict=True):
        indices = []
        for array in part.arrays:
            index = next((n for n, known in enumerate(arrays) if known is array), len(arrays))
            if index == len(arrays):
                arrays.append(array)
            indices.append(index)
        renumbered = part.items.copy()
        renumbered[:, 0] = np.asarray(indices)[part.items[:, 0]]
        items.append(renumbered)
        labels.append(part.labels + offset)
    noise, seed = (parts[0].noise, parts[0].seed) if parts else (0.0, 0)
    return LabelledImages(tuple(arrays), np.concatenate(items), noise, seed, np.concatenate(labels))


@dataclass(frozen=True)
class InMemoryImages:
    """Images in one tensor, named by a title and their row."""

    pixels: Tensor  # uint8 [N, 3, H, W]
    title: str = "memory"

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, rows: Sequence[int] | Rows) -> Tensor:
        return self.pixels[torch.as_tensor(np.asarray(rows))]

    def key(self, row: int) -> str:
        return f"{self.title}/{row}"

    def check(self) -> None:
        """Nothing can be unreadable."""
