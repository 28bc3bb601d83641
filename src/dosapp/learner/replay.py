"""Experience replay, for any method: a few old pictures beside every new batch.

Task-balanced: after t sessions each keeps floor(capacity / t) pictures, chosen at random; with more
sessions than room the newest keep one each. A replay batch is as large as the new one and is
concatenated with it into one contrastive batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dosapp.data.images import LabelledImages
from dosapp.runtime.rng import numpy_rng, torch_rng


@dataclass
class ReplayBuffer:
    """Stores pictures: a learner with a memory is not free of data, and says so when saved."""

    capacity: int = 0
    seed: int = 0
    images: list[Tensor] = field(default_factory=list)  # one uint8 [n, 3, H, W] per session
    labels: list[Tensor] = field(default_factory=list)  # [n], positions in student.classes

    def __len__(self) -> int:
        return sum(len(labels) for labels in self.labels)

    def keep(self, lessons: LabelledImages, positions: Tensor) -> None:
        """After a session: sub-sample the old ones, add as many of the new; `positions [n]` are
        the labels of the lessons in `student.classes`."""
        if not self.capacity:
            return
        sessions = len(self.labels) + 1
        room = max(1, self.capacity // sessions)
        for n, labels in enumerate(self.labels):
            rows = self._some(len(labels), room, sessions, n)
            self.images[n], self.labels[n] = self.images[n][rows], labels[rows]
        rows = self._some(len(lessons), room, sessions, sessions - 1)
        pixels = lessons.read(rows.numpy())
        self.images.append((pixels * 255).round().to(torch.uint8))
        self.labels.append(positions[rows])
        self.images = self.images[-self.capacity :]
        self.labels = self.labels[-self.capacity :]

    def _some(self, count: int, room: int, *when: int) -> Tensor:
        order = numpy_rng("memory", self.seed, *when).permutation(count)
        return torch.from_numpy(order[:room].copy()).sort().values

    def draw(self, size: int, *when: int) -> tuple[Tensor, Tensor] | None:
        """A replay batch for one step: pixels in [0, 1] and labels, or nothing to replay yet."""
        if not len(self):
            return None
        generator = torch_rng("replay", self.seed, *when)
        rows = torch.randperm(len(self), generator=generator)[:size]
        places = [(n, k) for n, labels in enumerate(self.labels) for k in range(len(labels))]
        drawn = [places[row] for row in rows.tolist()]  # never a copy of the whole memory
        pictures = torch.stack([self.images[n][k] for n, k in drawn])
        return pictures.float() / 255, torch.stack([self.labels[n][k] for n, k in drawn])

    def remove_class(self, index: int) -> None:
        """Drop the pictures of a class that has gone; those after it have moved up."""
        self.labels = [torch.where(n == index, -1, n - (n > index).long()) for n in self.labels]
        self._drop_unknown()

    def follow(self, old: Sequence[str], new: Sequence[str]) -> None:
        """The classes are others: keep the pictures of those that are still there, by name."""
        place = torch.tensor([new.index(name) if name in new else -1 for name in old])
        self.labels = [place[labels] for labels in self.labels]
        self._drop_unknown()

    def _drop_unknown(self) -> None:
        """Labels are -1 where the class has gone; so do the pictures, and sessions without any."""
        known = [labels >= 0 for labels in self.labels]
        left = [n for n, k in enumerate(known) if k.any()]
        self.images = [self.images[n][known[n]] for n in left]
        self.labels = [self.labels[n][known[n]] for n in left]

    def state(self) -> dict[str, Tensor]:
        return {f"pictures/{n}": p for n, p in enumerate(self.images)} | {
            f"labels/{n}": labels for n, labels in enumerate(self.labels)
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        count = sum(1 for name in state if name.startswith("labels/"))
        self.images = [state[f"pictures/{n}"] for n in range(count)]
        self.labels = [state[f"labels/{n}"] for n in range(count)]
