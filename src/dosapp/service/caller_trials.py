"""Who is responsible for a refused interval: each caller's images are learned from alone.

Each trial begins at the last session. The last version may be the work of another caller, and one
more honest interval the one too many. Shares say little, too: half of a step may be a flood's, or
that of the one honest caller.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dosapp.errors import DivergedError
from dosapp.learner.learner import Learner
from dosapp.service.guards import Guard, mean_disagreement

READER_CHECK_INTERVAL = 0.02  # seconds between two checks whether requests still wait
MAX_WAIT = 5.0  # seconds that requests may delay all trials, so that a flood cannot prevent them


@dataclass(frozen=True)
class Trials:
    """Learning from one caller's images at a time, on copies of the learner.

    Args:
        guard: Decides whether such an interval would be refused.
        is_reader_behind: Whether predictions, which have priority, wait.
        must_stop: Whether something else waits that cannot.
    """

    guard: Guard
    is_reader_behind: Callable[[], bool]
    must_stop: Callable[[], bool]

    def find_refused(
        self, images: Mapping[str, Sequence[Tensor]], make_learner: Callable[[], Learner]
    ) -> list[str] | None:
        """Find the callers whose images are refused alone.

        Args:
            images: Of the interval, by caller, `uint8 [3, H, W]` each.
            make_learner: Makes a learner at the state where a trial begins.

        Returns:
            These callers; None if there was no time to try.
        """
        deadline, refused = time.monotonic() + MAX_WAIT, []
        for caller, samples in images.items():
            is_refused = self._is_refused(samples, make_learner(), deadline)
            if is_refused is None:
                return None
            refused += [caller] if is_refused else []
        return refused

    def _is_refused(
        self, images: Sequence[Tensor], learner: Learner, deadline: float
    ) -> bool | None:
        """Whether an interval of these images would be refused; None if there was no time."""
        size, disagreement = self.guard.settings.adapt_batch_size, []
        try:
            for start in range(0, len(images), size):
                while self.is_reader_behind() and time.monotonic() < deadline:
                    time.sleep(READER_CHECK_INTERVAL)
                if self.must_stop():
                    return None
                result = learner.adapt(torch.stack(list(images[start : start + size])))
                if result is not None and result.stepped:
                    disagreement.append(result.disagreement)
        except DivergedError:
            return True
        if not disagreement:
            return False
        mean = mean_disagreement(learner.method, disagreement)
        return self.guard.check_interval(mean, learner.canary.measure(learner)) is not None
