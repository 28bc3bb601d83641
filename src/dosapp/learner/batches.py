"""Which pictures a step of a session sees: a function of the seed, the session and the step."""

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
from dosapp.settings import LearnerSettings


@dataclass(frozen=True)
class EpochBatches:
    """A pass over lessons, whose pictures are read when their turn comes."""

    rows: Sequence[np.ndarray]
    read: Callable[[np.ndarray], Batch]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.read, self.rows)


class SessionBatches:
    """The batches of one session; `number` sessions came before it."""

    def __init__(
        self,
        train: LabelledImages,
        labels: Tensor,  # [N], positions in the student's classes
        settings: LearnerSettings,
        number: int,
        memory: ReplayBuffer,
        device: torch.device,
    ) -> None:
        self.train, self.labels, self.number = train, labels, number
        self.seed, self.replay_buffer, self.device = settings.seed, memory, device
        self.size = min(settings.batch_size, len(train))
        self.per_epoch = len(train) // self.size  # the last, smaller batch is left out

    def epoch(self, n: int) -> EpochBatches:
        """New pictures only, for whoever wants to look at them all."""
        return EpochBatches(self._order(n), lambda rows: self._placed(self._read(rows)))

    def read(self, step: int) -> Batch:
        """The new pictures of a step, where they are; a thread may do this ahead of it."""
        epoch, n = divmod(step, self.per_epoch)
        return self._read(self._order(epoch)[n])

    def complete(self, batch: Batch, step: int) -> Batch:
        """What was read, on the device and joined by as many pictures of the memory."""
        batch = self._placed(batch)
        old = self.replay_buffer.draw(len(batch.labels), self.number, step)
        if old is None:
            return batch
        again = (*old, torch.ones(len(old[1]), dtype=torch.bool))
        both = zip((batch.pixels, batch.labels, batch.replayed), again, strict=True)
        return Batch(*(torch.cat([now, to_device(then, self.device)]) for now, then in both))

    def _order(self, epoch: int) -> list[np.ndarray]:
        order = numpy_rng("lessons", self.seed, self.number, epoch).permutation(len(self.train))
        return np.array_split(order[: self.per_epoch * self.size], self.per_epoch)

    def _read(self, rows: np.ndarray) -> Batch:
        new = torch.zeros(len(rows), dtype=torch.bool)
        return Batch(self.train.read(rows), self.labels[torch.from_numpy(rows)], new)

    def _placed(self, batch: Batch) -> Batch:
        parts = (batch.pixels, batch.labels, batch.replayed)
        return Batch(*(to_device(part, self.device) for part in parts))
