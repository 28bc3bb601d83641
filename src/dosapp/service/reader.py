"""Answers. Many questions become one batch, and a question is answered by one version."""

import os
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from dosapp.errors import BusyError
from dosapp.learner.learner import Learner, Prediction
from dosapp.service.settings import ServiceSettings


@dataclass(frozen=True)
class Published:
    """A version as it answers. Nobody writes to this learner: a newer one takes its place."""

    number: int
    learner: Learner


@dataclass(frozen=True)
class Answer:
    version: int
    predictions: list[Prediction]


@dataclass(frozen=True)
class Question:
    pixels: Tensor  # uint8 [n, 3, H, W]
    top: int
    answer: "Future[Answer]"


class Reader:
    def __init__(self, published: Published, settings: ServiceSettings) -> None:
        self.published = published  # replaced whole: whoever reads it has one version
        self.settings = settings
        self.waiting = 0  # pictures
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def behind(self) -> bool:
        """More pictures wait than the next batch takes."""
        return self.waiting > self.settings.batch_size

    def ask(self, pixels: Tensor, top: int = 5) -> "Future[Answer]":
        with self._counting:
            if self.waiting + len(pixels) > max(self.settings.max_queue, len(pixels)):
                raise BusyError(
                    f"{self.waiting} pictures wait for an answer already; try again later"
                )
            self.waiting += len(pixels)
        asked = Question(pixels, top, Future())
        self._questions.put(asked)
        return asked.answer

    def close(self) -> None:
        """Answer what waits, then end."""
        self._questions.put(None)
        self._thread.join()

    def _work(self) -> None:
        torch.set_num_threads(threads(self.settings))
        going = True
        while going:
            batch: list[Question] = []
            until = 0.0
            while sum(len(q.pixels) for q in batch) < self.settings.batch_size:
                left = max(0.0, until - time.monotonic()) if batch else None
                try:
                    question = self._questions.get(timeout=left)
                except queue.Empty:
                    break
                if question is None:
                    going = False
                    break
                if not batch:
                    until = time.monotonic() + self.settings.batch_wait
                batch.append(question)
            if batch:
                self._answer(batch)

    def _answer(self, batch: list[Question]) -> None:
        published = self.published
        try:
            pixels, top = torch.cat([q.pixels for q in batch]), max(q.top for q in batch)
            found: list[Prediction] = []
            for some in pixels.split(self.settings.batch_size):
                found += published.learner.predict(some, top)
        except Exception as error:
            for question in batch:
                if question.answer.set_running_or_notify_cancel():
                    question.answer.set_exception(error)
        else:
            for question in batch:
                mine, found = found[: len(question.pixels)], found[len(question.pixels) :]
                cut = [Prediction(p.label, p.score, p.top[: question.top]) for p in mine]
                if question.answer.set_running_or_notify_cancel():  # somebody still waits
                    question.answer.set_result(Answer(published.number, cut))
        finally:
            with self._counting:
                self.waiting -= sum(len(q.pixels) for q in batch)


def threads(settings: ServiceSettings) -> int:
    """Reader and writer compute at the same time: half of the cores for each."""
    return settings.threads or max(1, (os.cpu_count() or 1) // 2)
