"""A learner that predicts and learns at the same time: one reader, one writer, one folder.

    images ─ Reader ─ predictions                      sessions ─┐
               ↑ └──── images that were answered ─ stream ─ Writer ┴─ versions in the folder
               └──────────────── Published(n) ─────────────┘

A replica has no writer: it follows the versions that another process writes.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dosapp.data.folder import find_images, make_split
from dosapp.data.preprocess import Preprocess
from dosapp.errors import DosappError, InputError, ReadOnlyError
from dosapp.history.history import History
from dosapp.learner.canary import Canary
from dosapp.learner.learner import Learner, Prediction
from dosapp.learner.learner_folder import load_latest
from dosapp.runtime.files import lock_folder
from dosapp.service.audit import Audit
from dosapp.service.corrections import Corrections
from dosapp.service.jobs import Job, SessionOptions, list_open_jobs
from dosapp.service.reader import Answer, Published, Reader
from dosapp.service.settings import ServiceSettings, check_learner
from dosapp.service.tokens import Tokens
from dosapp.service.uploads import UNKNOWN, UploadDecoder, normalize_class_name
from dosapp.service.writer import Writer

FOLLOW_INTERVAL = 0.2  # seconds between two looks of a replica at the folder

logger = logging.getLogger("dosapp.service")


@dataclass(frozen=True)
class ServedPrediction(Prediction):
    """A prediction whose label is 'unknown' if its score is below the service's threshold."""

    known: bool


@dataclass(frozen=True)
class PredictResult:
    """Predictions for the images of one request, and the version that made them."""

    version: int
    predictions: list[ServedPrediction]


class Service:
    """What learning services and replicas have in common; changes raise a `ReadOnlyError`."""

    def __init__(self, folder: Path, settings: ServiceSettings | None = None) -> None:
        self.folder, self.settings = folder, settings or ServiceSettings()
        self.tokens, self.audit = Tokens(folder), Audit(folder)
        self.started = time.monotonic()
        self.answered = 0  # images
        self.at_close = contextlib.ExitStack()  # callbacks of others that use this service
        self.reader: Reader
        self.history: History
        self.uploads: UploadDecoder

    def start(self) -> None:
        """Start the threads."""
        self.reader.start()

    def close(self) -> None:
        """Answer the requests that wait, then end the threads."""
        self.reader.close()
        self.at_close.close()

    def predict(
        self, pixels: Tensor, top: int = 5, learn: bool = True, caller: str = ""
    ) -> "Future[PredictResult]":
        """Classify images, and offer them to the stream.

        Args:
            pixels: `uint8 [n, 3, H, W]`.
            top: How many of the best classes to report per image.
            learn: Whether the service may adapt to the images.
            caller: Whose images they are; callers are answered in turn.

        Returns:
            A future of the predictions. Cancelling it keeps the images out of the stream.

        Raises:
            BusyError: Too many images wait already.
        """
        result: Future[PredictResult] = Future()

        def complete(reply: "Future[Answer]") -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                answer = reply.result()
                self.answered += len(pixels)
                if learn:
                    self._try_offer(pixels, answer.predictions, caller)
                served = [self._apply_threshold(p) for p in answer.predictions]
                result.set_result(PredictResult(answer.version, served))
            except Exception as error:
                result.set_exception(error)

        self.reader.submit(pixels, top, caller).add_done_callback(complete)
        return result

    def _try_offer(self, pixels: Tensor, predictions: Sequence[Prediction], caller: str) -> None:
        """Offer images to the stream; an error there does not fail the prediction."""
        try:
            self.offer(pixels, predictions, caller)
        except Exception:
            logger.exception("predicted images were not offered to the stream")

    def _apply_threshold(self, p: Prediction) -> ServedPrediction:
        known = p.score >= self.settings.unknown_threshold
        return ServedPrediction(p.label if known else UNKNOWN, p.score, p.top, known)

    def offer(self, pixels: Tensor, predictions: Sequence[Prediction], caller: str = "") -> None:
        """Add images that were answered to the stream, if this service has one."""

    @property
    def is_ready(self) -> bool:
        """Whether all threads run."""
        return self.reader.is_alive

    @property
    def version(self) -> int:
        """The version that answers."""
        return self.reader.published.number

    @property
    def classes(self) -> list[str]:
        """The classes of the version that answers."""
        return self.reader.published.learner.classes

    def status(self) -> dict[str, Any]:
        """Return the live state as JSON."""
        return {
            "version": self.version,
            "classes": len(self.classes),
            "answered": self.answered,
            "waiting": self.reader.waiting,
            "seconds": round(time.monotonic() - self.started, 1),
            "writes": False,
        }

    # Changes, which need a writer

    def _read_only(self) -> ReadOnlyError:
        return ReadOnlyError("this replica only reads; send changes to the writer's service")

    def learn(
        self,
        images: Mapping[str, Tensor],
        caller: str,
        lr: float | None = None,
        epochs: int | None = None,
    ) -> Job:
        """Queue a session of images by class name, with the corrections that wait."""
        raise self._read_only()

    def correct(self, image: Tensor, name: str, caller: str, new_class: bool = False) -> int:
        """Keep an image with its true class for the next session; return how many wait."""
        raise self._read_only()

    def forget_corrections(self, caller: str) -> int:
        """Drop the corrections that wait; return how many there were."""
        raise self._read_only()

    def job(self, name: str) -> Job | None:
        """Find a job by its id."""
        return None

    def jobs(self) -> list[Job]:
        """Return all jobs that are known, the oldest first."""
        return []

    def cancel(self, job: Job, caller: str) -> None:
        """Cancel a session; it ends after its current step."""
        raise self._read_only()

    def rollback(self, number: int, caller: str) -> tuple[int, str]:
        """Restore a version as a new version; return its number, and a note on corrections."""
        raise self._read_only()

    def rename(self, old: str, new: str, caller: str) -> int:
        """Rename a class, as a new version; return its number."""
        raise self._read_only()

    def remove(self, name: str, caller: str) -> int:
        """Remove a class, as a new version; return its number."""
        raise self._read_only()

    def freeze(self, caller: str) -> str:
        """Stop adaptation at once; return why a restart would not know it, "" if it will."""
        raise self._read_only()

    def unfreeze(self, caller: str) -> str:
        """Start adaptation again; return why a restart would not know it, "" if it will."""
        raise self._read_only()


class LearningService(Service):
    """The service that owns a folder and writes its versions.

    Args:
        folder: Of a learner.
        settings: Of the service.
        canary: Labelled images beside those of the sessions; overrides the setting `canary`.

    Raises:
        InputError: The learner's method stores images of the stream.
    """

    def __init__(
        self, folder: Path, settings: ServiceSettings | None = None, canary: Canary | None = None
    ) -> None:
        super().__init__(folder, settings)
        place = self.settings.backbone
        learner = Learner.open(folder, place, self.settings.device, trainable=False)
        if learner.method.stores_data:
            raise InputError(
                f"the method of '{folder}' stores images of the stream, which a service never "
                "does; choose another --adapt for the learner"
            )
        s = self.settings
        overrides = {"confidence_gate": s.confidence_gate, "skew_aware_ema": s.skew_aware_ema}
        given = {name: value for name, value in overrides.items() if value is not None}
        learner.settings = learner.settings.model_copy(update=given)
        self.history = learner.history(folder)
        exists = self.history.exists()
        learner = learner.at(*load_latest(self.history)) if exists else learner.at(learner.state())
        if self.history.has_corrupt_tail:  # set it aside before a request can read it
            self.history.checkpoint(learner.state(), learner.working_state())
        self.uploads = UploadDecoder(learner.preprocess, s)
        if canary is None and s.canary is not None:
            canary = load_canary(s.canary, learner.preprocess)
        if not self.history.head:
            self.history.append(learner.state(), learner.working_state(), "service started")
        first = Published(self.history.head, learner.at(learner.state(), trainable=False))
        self.reader = Reader(first, s)
        self.writer = Writer(learner, self.history, s, self._publish, canary)
        self.writer.on_event = self._audit
        self.writer.is_reader_behind = self.reader.is_behind
        self._corrections = Corrections(s.max_queue)

    def _publish(self, published: Published) -> None:
        self.reader.published = published

    def _audit(self, event: str, details: Mapping[str, Any]) -> None:
        caller = str(details.get("who", "guard"))
        try:
            self.audit.write(event, caller, {k: v for k, v in details.items() if k != "who"})
        except DosappError as error:  # a full disk must not stop the writer
            logger.warning("the audit log cannot be written: %s", error)

    def start(self) -> None:
        """Start reader and writer."""
        super().start()
        self.writer.start()

    def close(self) -> None:
        """Answer the requests that wait, save the stream's steps, then end the threads."""
        super().close()
        self.writer.close()

    @property
    def is_ready(self) -> bool:
        """Whether reader and writer run."""
        return self.reader.is_alive and self.writer.is_alive

    def offer(self, pixels: Tensor, predictions: Sequence[Prediction], caller: str = "") -> None:
        """Add images that were answered to the stream."""
        self.writer.offer(pixels, predictions, caller)

    def status(self) -> dict[str, Any]:
        """Return the live state as JSON, with the writer's."""
        writer = self.writer
        return super().status() | {
            "writes": True,
            "adapts": self.settings.adapt and writer.learner.adapts and not writer.adaptation_off,
            "adaptation_off": writer.adaptation_off,
            "frozen": writer.frozen,
            "left_out": list(writer.guard.left_out),
            "trouble": "; ".join(filter(None, (writer.last_error, writer.freeze_error))),
            "stream": writer.waiting,
            "corrections": len(self._corrections),
            "at_work": self.is_ready,
            "signals": writer.signals.to_dict(len(self.classes)),
            "jobs": [job.to_dict() for job in list_open_jobs(self.jobs())],
        }

    # Sessions and corrections

    def learn(
        self,
        images: Mapping[str, Tensor],
        caller: str,
        lr: float | None = None,
        epochs: int | None = None,
    ) -> Job:
        """Queue a session of images by class name, with the corrections that wait."""
        corrections = self._corrections.take()
        try:
            session = dict(images)
            by_class = corrections.by_class()
            for name, corrected in by_class.items():
                uploaded = [session[name]] if name in session else []
                session[name] = torch.cat([*uploaded, corrected])
            if not session:
                raise InputError("there is nothing to learn: no images, and no corrections wait")
            must_train = {name: len(corrected) for name, corrected in by_class.items()}
            options = SessionOptions(lr, epochs, must_train)
            give_back = partial(self._corrections.give_back, corrections)
            return self.writer.learn(session, caller, give_back, options)
        except BaseException:
            self._corrections.give_back(corrections)
            raise

    def correct(self, image: Tensor, name: str, caller: str, new_class: bool = False) -> int:
        """Keep an image with its true class for the next session; return how many wait.

        Args:
            image: `uint8 [3, H, W]`. A later correction of the same image replaces an earlier one.
            name: The class.
            caller: For the audit log.
            new_class: Confirms that the class is new, and not a typo.

        Raises:
            InputError: The class is not known, and not confirmed.
            BusyError: Too many corrections wait.
        """
        name = normalize_class_name(name)
        waiting = self._corrections.add(image, name, None if new_class else self.classes)
        self._audit("corrected", {"who": caller, "class": name})
        return waiting

    def forget_corrections(self, caller: str) -> int:
        """Drop the corrections that wait; return how many there were."""
        count = len(self._corrections.take())
        if count:
            self._audit("forgot corrections", {"who": caller, "images": count})
        return count

    def job(self, name: str) -> Job | None:
        """Find a job by its id."""
        return self.writer.jobs.get(name)

    def jobs(self) -> list[Job]:
        """Return all jobs that are known, the oldest first."""
        return list(self.writer.jobs.values())

    def cancel(self, job: Job, caller: str) -> None:
        """Cancel a session; it ends after its current step."""
        if self.writer.cancel(job):
            self._audit("cancelled", {"who": caller, "job": job.id})

    # Commands. The writer's thread also writes the audit log, even if the caller is gone by then.

    def rollback(self, number: int, caller: str) -> tuple[int, str]:
        """Restore a version as a new version; return its number, and a note on corrections."""
        self.history.version(number)  # raises before the writer is interrupted
        command = partial(self.writer.rollback, number, caller)
        version = self._run_command("rolled back", caller, command, {"to": number})
        # Corrections of a class that is gone would add it again in the next session.
        return version, self._corrections.drop_unknown(self.classes)

    def rename(self, old: str, new: str, caller: str) -> int:
        """Rename a class, as a new version; return its number."""
        name = normalize_class_name(new)

        def command() -> int:
            version = self.writer.rename(old, name, caller)
            self._corrections.rename(old, name)
            return version

        return self._run_command("renamed", caller, command, {"class": old, "to": name})

    def remove(self, name: str, caller: str) -> int:
        """Remove a class, as a new version; return its number."""

        def command() -> int:
            version = self.writer.remove(name, caller)
            self._corrections.rename(name, None)
            return version

        return self._run_command("removed", caller, command, {"class": name})

    def freeze(self, caller: str) -> str:
        """Stop adaptation at once; return why a restart would not know it, "" if it will."""
        if self.writer.freeze(f"frozen by {caller}"):
            self._audit("froze", {"who": caller, "version": self.version})
        return self.writer.freeze_error

    def unfreeze(self, caller: str) -> str:
        """Start adaptation again; return why a restart would not know it, "" if it will."""
        if self.writer.unfreeze():
            self._audit("unfroze", {"who": caller, "version": self.version})
        return self.writer.freeze_error

    def _run_command(
        self,
        event: str,
        caller: str,
        command: Callable[[], int],
        details: Mapping[str, Any] | None = None,
    ) -> int:
        def run() -> int:
            version = command()
            self._audit(event, {"who": caller, **(details or {}), "version": version})
            return version

        return self.writer.submit(run).result()


class Replica(Service):
    """Follows the versions of a folder that another service writes."""

    def __init__(self, folder: Path, settings: ServiceSettings | None = None) -> None:
        super().__init__(folder, settings)
        place = self.settings.backbone
        self._learner = Learner.open(folder, place, self.settings.device, trainable=False)
        self.history = self._learner.history(folder)
        self.uploads = UploadDecoder(self._learner.preprocess, self.settings)
        self._head = (0, "")  # number and checksum of the version that is published
        self.reader = Reader(self._load_head(), self.settings)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def _load_head(self) -> Published:
        head = self.history.head_id
        learner = self._learner.at(self.history.at(head[0]), trainable=False)
        self._head = head
        return Published(head[0], learner)

    def _follow(self) -> None:
        while not self._closing.wait(FOLLOW_INTERVAL):
            try:
                if self.history.head_id != self._head:
                    self.reader.published = self._load_head()
                    logger.info("following version %d", self.version)
            except (DosappError, OSError) as error:  # the writer may be replacing a file
                logger.warning("the newest version cannot be read, trying again: %s", error)

    def start(self) -> None:
        """Start the reader, and follow the folder."""
        super().start()
        self._thread.start()

    def close(self) -> None:
        """Stop following, answer the requests that wait, then end the threads."""
        self._closing.set()
        self._thread.join()
        super().close()

    @property
    def is_ready(self) -> bool:
        """Whether the reader runs and the folder is followed."""
        return self.reader.is_alive and self._thread.is_alive()


@contextlib.contextmanager
def open_service(
    folder: Path,
    settings: ServiceSettings | None = None,
    *,
    follow: bool = False,
    canary: Canary | None = None,
) -> Iterator[Service]:
    """Run a service while the context is open.

    Args:
        folder: Of a learner.
        settings: Of the service.
        follow: Open a replica, which only reads; otherwise the folder is locked for one writer.
        canary: Labelled images for the guards.

    Yields:
        The running service.

    Raises:
        BusyError: Another process writes the folder.
        InputError: The folder holds no learner, or one that cannot be served.
    """
    check_learner(folder)
    with contextlib.nullcontext() if follow else lock_folder(folder) as lock:
        service = Replica(folder, settings) if follow else LearningService(folder, settings, canary)
        if lock is not None:
            service.history.begin_writing(lock)
        with run_service(service):
            yield service


@contextlib.contextmanager
def run_service(service: Service) -> Iterator[Service]:
    """Start a service and close it at the end of the context."""
    service.start()
    try:
        yield service
    finally:
        service.close()


def load_canary(folder: Path, preprocess: Preprocess) -> Canary:
    """Load every image of class folders, train and test alike, as a canary."""
    train, test = find_images(folder)
    files = train + test
    names = sorted({name for _, name in files})
    split = make_split(files, names, folder)
    images = torch.stack([preprocess(split.images.open(row)) for row in range(len(files))])
    return Canary.from_images(images, [names[n].replace("_", " ") for n in split.labels])
