"""The labelled batches of a session: a function of the seed, the session and the step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dosapp.data.images import LabelledImages
from dosapp.learner.replay import ReplayBuffer
from dosapp.methods.base import Batch
from dosapp.runtime.devices import to_device
from dosapp.runtime.rng import numpy_rng


@dataclass(frozen=True)
class EpochBatches:
    """One epoch over a session; each batch is read when its turn comes."""

    rows: Sequence[np.ndarray]
    read: Callable[[np.ndarray], Batch]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.read, self.rows)


class SessionBatches:
    """The batches of one session.

    Args:
        train: The images of the session.
        labels: Their labels `[N]`, indices of the student's classes.
        batch_size: At most the number of images.
        seed: Of the order.
        session: The number of sessions before this one.
        replay_buffer: Images of earlier sessions.
        device: Where batches are used.
    """

    def __init__(
        self,
        train: LabelledImages,
        labels: Tensor,
        batch_size: int,
        seed: int,
        session: int,
        replay_buffer: ReplayBuffer,
        device: torch.device,
    ) -> None:
        self.train, self.labels, self.session = train, labels, session
        self.seed, self.replay_buffer, self.device = seed, replay_buffer, device
        self.batch_size = batch_size
        self.steps_per_epoch = len(train) // batch_size  # the last, smaller batch is dropped

    def iter_epoch(self, number: int) -> EpochBatches:
        """One epoch of the session's own images, without replay."""
        return EpochBatches(self._order(number), lambda rows: self._on_device(self._read(rows)))

    def read(self, step: int) -> Batch:
        """Read the new images of a step into memory; can run in a thread ahead of it."""
        epoch, number = divmod(step, self.steps_per_epoch)
        return self._read(self._order(epoch)[number])

    def with_replay(self, batch: Batch, step: int) -> Batch:
        """Move a batch to the device and append as many replayed images."""
        batch = self._on_device(batch)
        replayed = self.replay_buffer.sample(len(batch.labels), self.session, step)
        if replayed is None:
            return batch
        pixels, labels = replayed
        old = self._on_device(Batch(pixels, labels, torch.ones(len(labels), dtype=torch.bool)))
        return Batch(
            torch.cat([batch.pixels, old.pixels]),
            torch.cat([batch.labels, old.labels]),
            torch.cat([batch.replayed, old.replayed]),
        )

    def _order(self, epoch: int) -> list[np.ndarray]:
        """The rows of each batch of an epoch."""
        order = numpy_rng("lessons", self.seed, self.session, epoch).permutation(len(self.train))
        return np.array_split(order[: self.steps_per_epoch * self.batch_size], self.steps_per_epoch)

    def _read(self, rows: np.ndarray) -> Batch:
        replayed = torch.zeros(len(rows), dtype=torch.bool)
        return Batch(self.train.read(rows), self.labels[torch.from_numpy(rows)], replayed)

    def _on_device(self, batch: Batch) -> Batch:
        parts = (batch.pixels, batch.labels, batch.replayed)
        return Batch(*(to_device(part, self.device) for part in parts))
