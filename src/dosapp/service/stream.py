"""The stream: images that were answered and wait for a step, of several callers."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dosapp.service.settings import ServiceSettings

RECENT = 1024  # images by which it is judged who sends
OTHERS = 0.05  # share of them that all other callers send; with less they do not bound a caller


@dataclass(frozen=True)
class StreamSample:
    """An image of the stream and its prediction."""

    pixels: Tensor  # uint8 [3, H, W]
    label: str
    score: float
    time: float  # monotonic
    caller: str = ""


class Stream:
    """Waiting images by caller, who take turns.

    If the caller with the most gives a part of a step only, its images wait for those of others;
    unless it is the only one, or the others send almost nothing.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self._waiting: dict[str, deque[StreamSample]] = {}  # no deque is empty
        self._recent: deque[str] = deque(maxlen=RECENT)  # callers of the last images

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def oldest(self) -> float:
        """The time of the image that waits longest."""
        return min(samples[0].time for samples in self._waiting.values())

    def put(self, sample: StreamSample) -> bool:
        """Add an image; if the queue is full, drop one of the caller with the most.

        Returns:
            Whether an image was dropped.
        """
        self._recent.append(sample.caller)
        self._waiting.setdefault(sample.caller, deque()).append(sample)
        if len(self) <= self.settings.max_queue:
            return False
        longest = max(self._waiting, key=lambda caller: len(self._waiting[caller]))
        self._waiting[longest].pop()
        self._drop_empty()
        return True

    def take(
        self, at_least: int, caller_share: Callable[[str], float] = lambda caller: 1.0
    ) -> list[StreamSample] | None:
        """Take images of callers in turn: as many as a step has, or None if there are too few.

        Args:
            at_least: Number of images that are enough.
            caller_share: Part of a step that a caller gives at most while others send.
        """
        size, limit = self.settings.adapt_batch_size, self._caller_limit(caller_share)
        left = {caller: min(limit, len(samples)) for caller, samples in self._waiting.items()}
        count = min(size, sum(left.values()))
        if count < at_least:
            return None
        batch: list[StreamSample] = []
        while len(batch) < count:
            for caller in [c for c in left if left[c]][: count - len(batch)]:
                batch.append(self._waiting[caller].popleft())
                left[caller] -= 1
        self._drop_empty()
        return batch

    def drop_caller(self, caller: str) -> int:
        """Drop a caller's images, and forget that it sent any; return how many were dropped."""
        dropped = len(self._waiting.pop(caller, ()))
        self._recent = deque((c for c in self._recent if c != caller), maxlen=RECENT)
        return dropped

    def clear(self) -> None:
        """Drop all images."""
        self._waiting.clear()

    def _caller_limit(self, caller_share: Callable[[str], float]) -> int:
        """How many images of the next step one caller may give."""
        size = self.settings.adapt_batch_size
        if not self._waiting:
            return size
        first = max(self._waiting, key=lambda caller: len(self._waiting[caller]))
        if (share := caller_share(first)) >= 1:
            return size
        sent_by_others = len(self._recent) - self._recent.count(first)
        if sent_by_others < OTHERS * len(self._recent) or not sent_by_others:
            return size
        others = len(self) - len(self._waiting[first])
        return min(int(share * size), int(share / (1 - share) * others))

    def _drop_empty(self) -> None:
        self._waiting = {caller: samples for caller, samples in self._waiting.items() if samples}
