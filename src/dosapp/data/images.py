"""Some of the pictures of some sources, in an order: what a learner or an examiner reads from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from dosapp.data.base import ImageArray, Rows, Split
from dosapp.data.prefetch import prefetch
from dosapp.runtime.rng import numpy_rng


@dataclass(frozen=True)
class UnlabelledImages:
    """ImageArray in a fixed order. There is no field for labels, so none can leak."""

    sources: tuple[ImageArray, ...]
    items: Rows  # [N, 2]: source, row
    noise: float = 0.0
    seed: int = 0

    def __len__(self) -> int:
        return len(self.items)

    def read(self, positions: Sequence[int] | Rows) -> Tensor:
        """`float32 [n, 3, H, W]` in [0, 1], with this view's noise."""
        chosen = self.items[np.asarray(positions, dtype=np.int64)]
        if not len(chosen):
            return torch.zeros(0, 3, 0, 0)
        batch: list[Tensor] = [torch.empty(0)] * len(chosen)
        for source in np.unique(chosen[:, 0]):
            places = np.flatnonzero(chosen[:, 0] == source)
            pictures = self.sources[source].read(chosen[places, 1])
            for place, picture in zip(places, pictures, strict=True):
                batch[place] = picture
        pixels = torch.stack(batch).float() / 255
        if self.noise:
            keys = [self.sources[s].key(r) for s, r in chosen]
            pixels = torch.stack([self._noisy(x, key) for x, key in zip(pixels, keys, strict=True)])
        return pixels

    def _noisy(self, picture: Tensor, key: str) -> Tensor:
        """The same picture always gets the same noise, whoever reads it."""
        noise = numpy_rng("noise", self.seed, key).standard_normal(picture.shape, dtype=np.float32)
        return (picture + self.noise * torch.from_numpy(noise)).clamp(0, 1)

    def batches(self, size: int, start: int = 0) -> Iterator[Tensor]:
        """Once, in order; the last may be smaller. `start` counts batches already done."""
        rows = (
            np.arange(first, min(first + size, len(self)))
            for first in range(start * size, len(self), size)
        )
        return (pixels for _, pixels in prefetch(rows, self.read))

    def keys(self) -> list[str]:
        return [self.sources[s].key(int(r)) for s, r in self.items]


@dataclass(frozen=True)
class LabelledImages(UnlabelledImages):
    """The same with labels: positions in the class names of the task or session."""

    labels: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @classmethod
    def from_split(cls, part: Split, rows: Rows, labels: Rows) -> "LabelledImages":
        items = np.stack([np.zeros_like(rows), rows], axis=1)
        return cls((part.images,), items, labels=labels)

    def labelled_image_keys(self) -> list[tuple[str, int]]:
        return list(zip(self.keys(), self.labels.tolist(), strict=True))

    def subset(self, positions: Rows) -> "LabelledImages":
        return replace(self, items=self.items[positions], labels=self.labels[positions])

    def unlabelled(self) -> UnlabelledImages:
        return UnlabelledImages(self.sources, self.items, self.noise, self.seed)

    def empty(self) -> UnlabelledImages:
        """No pictures of these: for a session without a stream."""
        return UnlabelledImages(self.sources, self.items[:0])


def concat_images(parts: Sequence[LabelledImages], offsets: Sequence[int]) -> LabelledImages:
    """Several views as one; labels of each are shifted by its offset."""
    sources: list[ImageArray] = []
    items, labels = [np.zeros((0, 2), dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for part, offset in zip(parts, offsets, strict=True):
        places = [
            next((i for i, known in enumerate(sources) if known is source), -1)
            for source in part.sources
        ]
        for n, (place, source) in enumerate(zip(places, part.sources, strict=True)):
            if place < 0:
                places[n] = len(sources)
                sources.append(source)
        renumbered = part.items.copy()
        renumbered[:, 0] = np.asarray(places)[part.items[:, 0]]
        items.append(renumbered)
        labels.append(part.labels + offset)
    noise, seed = (parts[0].noise, parts[0].seed) if parts else (0.0, 0)
    return LabelledImages(
        tuple(sources), np.concatenate(items), noise, seed, np.concatenate(labels)
    )


@dataclass(frozen=True)
class InMemoryImages:
    """ImageArray that are simply there, named by a title and their position."""

    pixels: Tensor  # uint8 [N, 3, H, W]
    title: str = "memory"

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, rows: Sequence[int] | Rows) -> Tensor:
        return self.pixels[torch.as_tensor(np.asarray(rows))]

    def key(self, row: int) -> str:
        return f"{self.title}/{row}"

    def check(self) -> None: ...
