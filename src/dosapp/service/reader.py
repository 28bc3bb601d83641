"""The reader: requests are answered in batches, and each by exactly one version."""

import logging
import os
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from dosapp.errors import BusyError, DosappError
from dosapp.learner.learner import Learner, Prediction
from dosapp.service.settings import ServiceSettings

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


@dataclass(frozen=True)
class PendingPrediction:
    """Images waiting for their predictions."""

    pixels: Tensor  # uint8 [n, 3, H, W]
    top: int
    answer: "Future[Answer]"


class Reader:
    """One thread that predicts for all requests with the version that is published."""

    def __init__(self, published: Published, settings: ServiceSettings) -> None:
        self.published = published  # replaced as a whole, so a batch sees one version
        self.settings = settings
        self.waiting = 0  # images
        self._requests: queue.SimpleQueue[PendingPrediction | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
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

    def submit(self, pixels: Tensor, top: int = 5) -> "Future[Answer]":
        """Queue images `uint8 [n, 3, H, W]` for prediction.

        Raises:
            BusyError: Too many images wait already.
        """
        with self._lock:
            if self.waiting + len(pixels) > max(self.settings.max_queue, len(pixels)):
                raise BusyError(f"{self.waiting} images wait for an answer; try again later")
            self.waiting += len(pixels)
        request = PendingPrediction(pixels, top, Future())
        self._requests.put(request)
        return request.answer

    def close(self) -> None:
        """Answer the requests that wait, then end the thread."""
        self._requests.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(thread_count(self.settings))
        is_open = True
        while is_open:
            batch: list[PendingPrediction] = []
            deadline = 0.0
            while sum(len(r.pixels) for r in batch) < self.settings.batch_size:
                timeout = max(0.0, deadline - time.monotonic()) if batch else None
                try:
                    request = self._requests.get(timeout=timeout)
                except queue.Empty:
                    break
                if request is None:
                    is_open = False
                    break
                if not batch:
                    deadline = time.monotonic() + self.settings.batch_wait
                batch.append(request)
            if batch:
                self._answer(batch)

    def _answer(self, batch: list[PendingPrediction]) -> None:
        published = self.published
        try:
            pixels, top = torch.cat([r.pixels for r in batch]), max(r.top for r in batch)
            predictions: list[Prediction] = []
            for part in pixels.split(self.settings.batch_size):
                predictions += published.learner.predict(part, top)
        except Exception as error:
            if not isinstance(error, DosappError):
                logger.exception("version %d cannot predict", published.number)
            for request in batch:
                if request.answer.set_running_or_notify_cancel():
                    request.answer.set_exception(error)
        else:
            first = 0
            for request in batch:
                rows = predictions[first : first + len(request.pixels)]
                first += len(request.pixels)
                cut = [Prediction(p.label, p.score, p.top[: request.top]) for p in rows]
                if request.answer.set_running_or_notify_cancel():
                    request.answer.set_result(Answer(published.number, cut))
        finally:
            with self._lock:
                self.waiting -= sum(len(r.pixels) for r in batch)


def thread_count(settings: ServiceSettings) -> int:
    """Return torch's number of threads: reader and writer get half of the cores each."""
    return settings.threads or max(1, (os.cpu_count() or 1) // 2)
