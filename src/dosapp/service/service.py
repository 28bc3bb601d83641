"""A learner that is asked and taught at the same time: one reader, one writer, one folder.

    pictures ─ Reader ─ answers                        lessons ─┐
                 ↑ └──────── pictures answered ─ stream ─ Writer ┴─ versions in the folder
                 └──────────────── Published(n) ────────────┘
A replica has no writer: it follows the versions that another process writes.
"""

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dosapp.data.folder import find_images, make_split
from dosapp.errors import BusyError, DosappError, InputError, ReadOnlyError
from dosapp.history.history import History
from dosapp.learner.learner import Learner, load_latest
from dosapp.runtime.files import lock_folder
from dosapp.service.audit import Audit
from dosapp.service.guards import Canary
from dosapp.service.reader import Answer, Published, Reader
from dosapp.service.settings import ServiceSettings, check_learner
from dosapp.service.tokens import Tokens
from dosapp.service.uploads import Uploads, class_name
from dosapp.service.writer import Job, Writer

GLANCE = 0.2  # seconds between two looks of a replica


class Service:
    """Both kinds are the same to those who ask."""

    def __init__(
        self, folder: Path, settings: ServiceSettings | None = None, canary: Canary | None = None
    ) -> None:
        self.folder, self.settings = folder, settings or ServiceSettings()
        self.tokens, self.audit = Tokens(folder), Audit(folder)
        self.canary = canary
        self.started = time.monotonic()
        self.answered = 0  # pictures
        self.at_close = contextlib.ExitStack()  # what ends with the service, whoever made it
        self.reader: Reader
        self.history: History
        self.uploads: Uploads

    def start(self) -> None:
        self.reader.start()

    def close(self) -> None:
        """Answers what waits."""
        self.reader.close()
        self.at_close.close()

    def ask(self, pixels: Tensor, top: int) -> "Future[Answer]":
        return self.reader.ask(pixels, top)

    def answered_with(self, pixels: Tensor, answer: Answer, learn: bool) -> None:
        self.answered += len(pixels)

    @property
    def ready(self) -> bool:
        return self.reader.alive

    @property
    def version(self) -> int:
        return self.reader.published.number

    @property
    def classes(self) -> list[str]:
        return self.reader.published.learner.classes

    def status(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "classes": len(self.classes),
            "answered": self.answered,
            "waiting": self.reader.waiting,
            "seconds": round(time.monotonic() - self.started, 1),
            "writes": False,
        }

    # What only a writer can do

    def _refuse(self) -> ReadOnlyError:
        return ReadOnlyError("this replica only reads; ask the writer's service")

    def teach(self, pictures: Mapping[str, Tensor], who: str) -> Job:
        raise self._refuse()

    def correct(self, picture: Tensor, name: str, who: str) -> int:
        raise self._refuse()

    def forget_corrections(self, who: str) -> int:
        raise self._refuse()

    def job(self, name: str) -> Job | None:
        return None

    def jobs(self) -> list[Job]:
        return []

    def cancel(self, job: Job, who: str) -> None:
        raise self._refuse()

    def rollback(self, number: int, who: str) -> int:
        raise self._refuse()

    def rename(self, old: str, new: str, who: str) -> int:
        raise self._refuse()

    def remove(self, name: str, who: str) -> int:
        raise self._refuse()

    def freeze(self, who: str) -> str:
        raise self._refuse()

    def unfreeze(self, who: str) -> str:
        raise self._refuse()


class LearningService(Service):
    """The service that owns the folder."""

    def __init__(
        self, folder: Path, settings: ServiceSettings | None = None, canary: Canary | None = None
    ) -> None:
        super().__init__(folder, settings, canary)
        learner = Learner.open(folder, device=self.settings.device, learns=False)
        if learner.method.stores_data:
            raise InputError(
                f"'{folder}' learns with a method that keeps pictures of the stream; a service "
                "never does, so choose another --adapt for the learner"
            )
        s = self.settings
        changes = {"confidence_gate": s.confidence_gate, "skew_aware_ema": s.skew_aware_ema}
        wanted = {name: value for name, value in changes.items() if value is not None}
        learner.settings = learner.settings.model_copy(update=wanted)
        self.history = learner.history(folder)
        known = self.history.exists()
        learner = learner.at(*load_latest(self.history)) if known else learner.at(learner.state())
        if (
            self.history.has_corrupt_tail
        ):  # what could not be read is set aside before anybody asks for it
            self.history.checkpoint(learner.state(), learner.working_state())
        self.uploads = Uploads(learner, s)
        if canary is None and s.canary is not None:
            self.canary = load_canary(s.canary, self.uploads)
        if not self.history.head:
            self.history.commit(learner.state(), "the service began")
            self.history.checkpoint(learner.state(), learner.working_state())
        first = Published(self.history.head, learner.at(learner.state(), learns=False))
        self.reader = Reader(first, s)
        self.writer = Writer(learner, self.history, s, self._publish, self.canary)
        self.writer.watch, self.writer.pressed = self._noted, self.reader.behind
        self._corrections: dict[str, list[Tensor]] = {}
        self._turn = threading.Lock()

    def _publish(self, published: Published) -> None:
        self.reader.published = published

    def _noted(self, what: str, facts: Mapping[str, Any]) -> None:
        """The writer has done something by itself, or has finished something."""
        who = str(facts.get("who", "guard"))
        with contextlib.suppress(OSError):  # a full disk must not stop the writer
            self.audit.write(what, who, {k: v for k, v in facts.items() if k != "who"})

    def start(self) -> None:
        super().start()
        self.writer.start()

    def close(self) -> None:
        """And saves what was learned."""
        super().close()
        self.writer.close()

    @property
    def ready(self) -> bool:
        return self.reader.alive and self.writer.alive

    def answered_with(self, pixels: Tensor, answer: Answer, learn: bool) -> None:
        super().answered_with(pixels, answer, learn)
        if learn:
            self.writer.offer(pixels, answer.predictions)

    def status(self) -> dict[str, Any]:
        writer = self.writer
        with self._turn:
            corrections = self._count()
        return super().status() | {
            "writes": True,
            "adapts": self.settings.adapt and writer.learner.method.adapts,
            "frozen": writer.frozen,
            "trouble": "; ".join(filter(None, (writer.trouble, writer.unkept))),
            "stream": writer.waiting,
            "corrections": corrections,
            "at_work": self.ready,
            "signals": writer.signals.facts(len(self.classes)),
            "jobs": [job.facts() for job in self.jobs() if not job.ended.is_set()],
        }

    # Lessons

    def teach(self, pictures: Mapping[str, Tensor], who: str) -> Job:
        """New pictures, together with the corrections that have waited for them."""
        with self._turn:
            waiting, self._corrections = self._corrections, {}
        try:
            found = dict(pictures)
            for name, more in waiting.items():
                known = [found[name]] if name in found else []
                found[name] = torch.cat([*known, torch.stack(more)])
            if not found:
                raise InputError("there is nothing to learn: no pictures, and no corrections wait")
            return self.writer.teach(found, who, partial(self._wait_again, waiting))
        except BaseException:
            self._wait_again(waiting)
            raise

    def _wait_again(self, corrections: Mapping[str, list[Tensor]]) -> None:
        """Their lesson came to nothing."""
        with self._turn:
            for name, found in corrections.items():
                self._corrections.setdefault(name, []).extend(found)

    def _wait_as(self, new: str | None, old: str) -> None:
        """A class has another name, or is gone: so have its corrections, or they would teach it
        anew."""
        with self._turn:
            found = self._corrections.pop(old, [])
            if found and new is not None:
                self._corrections.setdefault(new, []).extend(found)

    def _count(self) -> int:
        return sum(len(found) for found in self._corrections.values())

    def correct(self, picture: Tensor, name: str, who: str) -> int:
        """A person says what a picture is: it joins the next session. Says how many wait."""
        name = class_name(name)
        with self._turn:
            waiting = self._count()
            if waiting >= self.settings.max_queue:
                raise BusyError(f"{waiting} corrections wait for a lesson already; start one")
            self._corrections.setdefault(name, []).append(picture)
        self._noted("corrected", {"who": who, "class": name})
        return waiting + 1

    def forget_corrections(self, who: str) -> int:
        with self._turn:
            count, self._corrections = self._count(), {}
        if count:
            self._noted("forgot corrections", {"who": who, "images": count})
        return count

    def job(self, name: str) -> Job | None:
        return self.writer.jobs.get(name)

    def jobs(self) -> list[Job]:
        return list(self.writer.jobs.values())

    def cancel(self, job: Job, who: str) -> None:
        if not job.ended.is_set():
            self.writer.cancel(job)
            self._noted("cancelled", {"who": who, "job": job.id})

    # Orders: what is written down about them is written by the writer, whoever still waits

    def rollback(self, number: int, who: str) -> int:
        self.history.version(number)  # before the writer is troubled
        facts = {"to": number}
        return self._ordered("rolled back", who, lambda: self.writer.rollback(number, who), facts)

    def rename(self, old: str, new: str, who: str) -> int:
        name = class_name(new)

        def order() -> int:
            version = self.writer.rename(old, name, who)
            self._wait_as(name, old)
            return version

        return self._ordered("renamed", who, order, {"class": old, "to": name})

    def remove(self, name: str, who: str) -> int:
        def order() -> int:
            version = self.writer.remove(name, who)
            self._wait_as(None, name)
            return version

        return self._ordered("removed", who, order, {"class": name})

    def freeze(self, who: str) -> str:
        """At once; says what could not be written about it."""
        self._ordered("froze", who, lambda: self.writer.freeze(f"frozen by {who}"))
        return self.writer.unkept

    def unfreeze(self, who: str) -> str:
        self._ordered("unfroze", who, self.writer.unfreeze)
        return self.writer.unkept

    def _ordered(
        self, what: str, who: str, order: Callable[[], int], facts: Mapping[str, Any] | None = None
    ) -> int:
        def carried_out() -> int:
            version = order()
            self._noted(what, {"who": who, **(facts or {}), "version": version})
            return version

        return self.writer.ask(carried_out).result()


class Replica(Service):
    """Follows the versions of a folder that another service writes."""

    def __init__(self, folder: Path, settings: ServiceSettings | None = None) -> None:
        super().__init__(folder, settings)
        self._learner = Learner.open(folder, device=self.settings.device, learns=False)
        self.history = self._learner.history(folder)
        self.uploads = Uploads(self._learner, self.settings)
        self._followed = (0, "")  # the newest head, by number and checksum
        self.reader = Reader(self._newest(), self.settings)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def _newest(self) -> Published:
        head = self.history.acknowledged
        learner = self._learner.at(self.history.at(head[0]), learns=False)
        self._followed = head  # now that it could be read
        return Published(head[0], learner)

    def _follow(self) -> None:
        while not self._ending.wait(GLANCE):
            try:
                if self.history.acknowledged != self._followed:
                    self.reader.published = self._newest()
            except (DosappError, OSError) as error:  # the writer was in the middle of something
                warnings.warn(f"{error}; looking again", stacklevel=1)

    def start(self) -> None:
        super().start()
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        super().close()

    @property
    def ready(self) -> bool:
        return self.reader.alive and self._thread.is_alive()


@contextlib.contextmanager
def open_service(
    folder: Path,
    settings: ServiceSettings | None = None,
    *,
    follow: bool = False,
    canary: Canary | None = None,
) -> Iterator[Service]:
    """A service at work; a folder has one writer, and as many replicas as one likes."""
    check_learner(folder)
    with contextlib.nullcontext() if follow else lock_folder(folder):
        service = Replica(folder, settings) if follow else LearningService(folder, settings, canary)
        with running(service):
            yield service


@contextlib.contextmanager
def running(service: Service) -> Iterator[Service]:
    service.start()
    try:
        yield service
    finally:
        service.close()


def load_canary(place: Path, uploads: Uploads) -> Canary:
    """Every picture of class folders (train and test alike: nothing of it is ever taught)."""
    train, test = find_images(place)
    found = train + test
    names = sorted({name for _, name in found})
    listing = make_split(found, names, place)
    pictures = torch.stack([uploads.prepare(listing.images.open(row)) for row in range(len(found))])
    return Canary(pictures, [names[n].replace("_", " ") for n in listing.labels])
