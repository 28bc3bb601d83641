"""The reader: requests are answered in batches, and each by exactly one version."""

import logging
import os
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dosapp.errors import BusyError, DosappError
from dosapp.learner.learner import Learner, Prediction
from dosapp.service.fair_queue import FairQueue
from dosapp.service.settings import ServiceSettings

ACTIVE_SECONDS = 1.0  # for which a caller counts as active after its last request

logger = logging.getLogger("dosapp.service.reader")


@dataclass(frozen=True)
class Published:
    """A version that answers. Its learner is never changed: a newer version replaces it."""

    number: int
    learner: Learner


@dataclass(frozen=True)
class Answer:
    """Predictions for the images of one request, and the version that made them."""

    version: int
    predictions: list[Prediction]


@dataclass
class PendingPrediction:
    """Images waiting for their predictions."""

    caller: str
    pixels: Tensor  # uint8 [n, 3, H, W]
    top: int
    answer: "Future[Answer]" = field(default_factory=Future)
    published: Published | None = None  # answers all of it, from its first image on
    predictions: list[Prediction] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """Number of images without a prediction."""
        return len(self.pixels) - len(self.predictions)


class Reader:
    """One thread that predicts for all requests with the version that is published.

    Callers take turns. While several are active, each gets a quarter of a batch at a time, so that
    none waits long for the images of another. A request of many images is answered in several
    batches, all by one version.
    """

    def __init__(self, published: Published, settings: ServiceSettings) -> None:
        self.published = published  # replaced as a whole, so a batch sees one version
        self.settings = settings
        self.waiting = 0  # images
        self._waiting_of: Counter[str] = Counter()  # callers
        self._last_seen: dict[str, float] = {}  # callers and the time of their last request
        self._queue: FairQueue[PendingPrediction] = FairQueue()
        self._condition = threading.Condition()
        self._is_closing = self._has_begun = False  # the last: some request is partly answered
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def is_behind(self) -> bool:
        """Whether more images wait than the next batch takes."""
        return self.waiting > self.settings.batch_size

    def submit(self, pixels: Tensor, top: int = 5, caller: str = "") -> "Future[Answer]":
        """Queue images `uint8 [n, 3, H, W]` for prediction.

        Raises:
            BusyError: Too many images wait already, of this caller or of all.
        """
        request, count = PendingPrediction(caller, pixels, top), len(pixels)
        with self._condition:
            own, most = self._waiting_of[caller], self.settings.max_caller_queue
            if own + count > max(most, count):
                raise BusyError(f"{own} images of '{caller}' wait for an answer; try again later")
            # A caller without waiting images is let in although others have filled the queue.
            if (own or not self._waiting_of) and self.waiting + count > max(
                self.settings.max_queue, count
            ):
                raise BusyError(f"{self.waiting} images wait for an answer; try again later")
            self.waiting += count
            self._waiting_of[caller] += count
            self._queue.put(caller, request)
            self._last_seen[caller] = time.monotonic()
            self._condition.notify()
        return request.answer

    def close(self) -> None:
        """Answer the requests that wait, then end the thread."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(thread_count(self.settings))
        while True:
            if batch := self._next_batch():
                self._answer(batch)
            elif self._is_closing and not len(self._queue):
                return

    def _next_batch(self) -> list[tuple[PendingPrediction, Tensor]]:
        """Wait for requests and take images of them in turn."""
        size = self.settings.batch_size
        with self._condition:
            self._condition.wait_for(lambda: len(self._queue) or self._is_closing)
            if not self._has_begun:  # wait for others
                self._condition.wait_for(
                    lambda: self.waiting >= size or self._is_closing, self.settings.batch_wait
                )
            batch: list[tuple[PendingPrediction, Tensor]] = []
            unfinished, room = [], size
            taken: set[str] = set()  # callers who had their turn
            share = size if self._count_active() <= 1 else max(1, size // 4)
            while len(self._queue) and room:
                request = self._queue.pop()
                if request.caller in taken and share < size:
                    unfinished.append(request)
                    break
                if request.answer.done():  # by an error in an earlier batch, or cancelled
                    self._count_answered(request, request.remaining)
                    continue
                first = batch[0][0] if batch else request
                request.published = request.published or first.published or self.published
                if request.published is not first.published:
                    unfinished.append(request)  # the next batch is for its version
                    break
                count = min(room, request.remaining, share)
                taken.add(request.caller)
                begin = len(request.predictions)
                batch.append((request, request.pixels[begin : begin + count]))
                room -= count
                if count < request.remaining:
                    unfinished.append(request)
            for request in reversed(unfinished):
                self._queue.put_back(request.caller, request)
            self._has_begun = bool(unfinished)
        return batch

    def _count_active(self) -> int:
        """Count the callers of the last second; the lock is held."""
        now = time.monotonic()
        self._last_seen = {c: t for c, t in self._last_seen.items() if now - t < ACTIVE_SECONDS}
        return len(self._last_seen)

    def _answer(self, batch: list[tuple[PendingPrediction, Tensor]]) -> None:
        published = batch[0][0].published
        assert published is not None
        try:
            pixels, top = torch.cat([part for _, part in batch]), max(r.top for r, _ in batch)
            predictions = published.learner.predict(pixels, top)
        except Exception as error:
            if not isinstance(error, DosappError):
                logger.exception("version %d cannot predict", published.number)
            for request, _ in batch:
                if request.answer.set_running_or_notify_cancel():
                    request.answer.set_exception(error)
            with self._condition:
                for request, _ in batch:
                    self._count_answered(request, request.remaining)
                    request.pixels = request.pixels[: len(request.predictions)]  # none remain
            return
        first = 0
        for request, part in batch:
            rows = predictions[first : first + len(part)]
            first += len(part)
            cut = [Prediction(p.label, p.score, p.top[: request.top]) for p in rows]
            request.predictions += cut
        with self._condition:
            for request, part in batch:
                self._count_answered(request, len(part))
        for request, _ in batch:
            if not request.remaining and request.answer.set_running_or_notify_cancel():
                request.answer.set_result(Answer(published.number, request.predictions))

    def _count_answered(self, request: PendingPrediction, count: int) -> None:
        """Count images as answered; the lock is held."""
        self.waiting -= count
        self._waiting_of[request.caller] -= count
        if self._waiting_of[request.caller] <= 0:
            del self._waiting_of[request.caller]


def thread_count(settings: ServiceSettings) -> int:
    """Return torch's number of threads: reader and writer get half of the cores each."""
    return settings.threads or max(1, (os.cpu_count() or 1) // 2)
