"""Experience replay, for any method: some stored images beside every new batch.

Task-balanced: after t sessions each keeps floor(capacity / t) random images; with more sessions
than capacity the newest keep one each. A replayed batch is as large as the new one and is
concatenated with it into one contrastive batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dosapp.data.images import LabelledImages
from dosapp.data.preprocess import to_bytes, to_float
from dosapp.runtime.rng import numpy_rng, torch_rng


@dataclass
class ReplayBuffer:
    """Labelled images of earlier sessions. With a capacity of 0 nothing is stored."""

    capacity: int = 0
    seed: int = 0
    images: list[Tensor] = field(default_factory=list)  # one uint8 [n, 3, H, W] per session
    labels: list[Tensor] = field(default_factory=list)  # [n], indices of the student's classes

    def __len__(self) -> int:
        return sum(len(labels) for labels in self.labels)

    def add_session(self, train: LabelledImages, labels: Tensor) -> None:
        """Sub-sample the old sessions and add as many images of a new one.

        Args:
            train: The images of the session.
            labels: Their labels `[n]`, indices of the student's classes.
        """
        if not self.capacity:
            return
        sessions = len(self.labels) + 1
        room = max(1, self.capacity // sessions)
        for n, old in enumerate(self.labels):
            rows = self._sample_rows(len(old), room, sessions, n)
            self.images[n], self.labels[n] = self.images[n][rows], old[rows]
        rows = self._sample_rows(len(train), room, sessions, sessions - 1)
        self.images.append(to_bytes(train.read(rows.numpy())))
        self.labels.append(labels[rows])
        self.images = self.images[-self.capacity :]
        self.labels = self.labels[-self.capacity :]

    def _sample_rows(self, count: int, room: int, *position: int) -> Tensor:
        order = numpy_rng("memory", self.seed, *position).permutation(count)
        return torch.from_numpy(order[:room].copy()).sort().values

    def sample(self, size: int, *position: int) -> tuple[Tensor, Tensor] | None:
        """A replayed batch: pixels in [0, 1] and labels; None if the buffer is empty."""
        if not len(self):
            return None
        generator = torch_rng("replay", self.seed, *position)
        rows = torch.randperm(len(self), generator=generator)[:size]
        entries = [(n, k) for n, labels in enumerate(self.labels) for k in range(len(labels))]
        sampled = [entries[row] for row in rows.tolist()]  # without a copy of the whole buffer
        pixels = to_float(torch.stack([self.images[n][k] for n, k in sampled]))
        return pixels, torch.stack([self.labels[n][k] for n, k in sampled])

    def remove_class(self, index: int) -> None:
        """Drop the images of a class; the indices after it decrease by one."""
        self.labels = [torch.where(n == index, -1, n - (n > index).long()) for n in self.labels]
        self._drop_unknown()

    def relabel(self, old: Sequence[str], new: Sequence[str]) -> None:
        """Follow a change of the class list by name; images of missing classes are dropped."""
        index = torch.tensor([new.index(name) if name in new else -1 for name in old])
        self.labels = [index[labels] for labels in self.labels]
        self._drop_unknown()

    def _drop_unknown(self) -> None:
        """Drop images with label -1, and sessions without images."""
        known = [labels >= 0 for labels in self.labels]
        kept = [n for n, mask in enumerate(known) if mask.any()]
        self.images = [self.images[n][known[n]] for n in kept]
        self.labels = [self.labels[n][known[n]] for n in kept]

    def state_dict(self) -> dict[str, Tensor]:
        """Images and labels by session."""
        return {f"pictures/{n}": images for n, images in enumerate(self.images)} | {
            f"labels/{n}": labels for n, labels in enumerate(self.labels)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state_dict`."""
        count = sum(1 for name in state if name.startswith("labels/"))
        self.images = [state[f"pictures/{n}"] for n in range(count)]
        self.labels = [state[f"labels/{n}"] for n in range(count)]
