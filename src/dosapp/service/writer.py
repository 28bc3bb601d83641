"""The writer: the one thread that changes weights, by sessions, the stream and rollbacks in turn.

Readers never see it at work. Its results become visible as a version: written, acknowledged by a
checkpoint, then published as a whole. A version follows every session and every interval of steps
on the stream, so a crash loses at most one interval, and no session that was reported done.
"""

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from dosapp.errors import (
    BusyError,
    CorruptRecordError,
    DivergedError,
    DosappError,
    InputError,
    StorageError,
    TooLargeError,
    UnavailableError,
)
from dosapp.history.history import History
from dosapp.history.record import State
from dosapp.learner.canary import Canary, CanaryGaps
from dosapp.learner.learner import Learner, Prediction
from dosapp.learner.learner_folder import record_stored_images
from dosapp.learner.session_input import describe_only_class
from dosapp.runtime.files import read_json, write_json
from dosapp.runtime.plural import plural
from dosapp.service.caller_trials import READER_CHECK_INTERVAL, Trials
from dosapp.service.drift import (
    copy_answering_weights,
    find_session_version,
    learner_after_session,
    measure_drift,
)
from dosapp.service.guards import Guard, Signals, mean_disagreement
from dosapp.service.jobs import Job, SessionCancelledError, SessionOptions
from dosapp.service.reader import Published, thread_count
from dosapp.service.settings import ServiceSettings
from dosapp.service.stream import Stream, StreamSample

T = TypeVar("T")
KEPT_JOBS = 100  # ended jobs that can still be looked up
WRITER_ENDED = "the writer has ended, so this will not be done; restart the service"

logger = logging.getLogger("dosapp.service.writer")


class Writer:
    """Owns the learner, its history and the queue of the stream.

    Args:
        learner: Trains; replaced when the writer returns to an earlier state.
        history: Where versions are appended.
        settings: Of the service.
        publish: Called with every new version.
        canary: Labelled images beside the learner's own that decide whether a change is published.
    """

    def __init__(
        self,
        learner: Learner,
        history: History,
        settings: ServiceSettings,
        publish: Callable[[Published], None],
        canary: Canary | None = None,
    ) -> None:
        self.settings, self.history = settings, history
        if canary is not None:
            learner.canary.add_given(canary, learner_after_session(learner, history))
        self.learner = learner
        self.signals, self.guard = Signals(), Guard(settings)
        self._freeze_file = history.folder / "service.json"
        # Why adaptation is stopped, "" if it is not. It takes effect at once, written or not.
        self.frozen: str = ""
        if self._freeze_file.exists():
            self.frozen, self.guard.left_out = _read_frozen(self._freeze_file)
        self.freeze_error = ""  # why a restart would not know that, or who is left out
        self._freeze_lock = threading.RLock()
        self.last_error = ""  # the last error, until a version is written
        self.jobs: dict[str, Job] = {}
        self.on_event: Callable[[str, Mapping[str, Any]], None] = lambda event, details: None
        self.is_reader_behind: Callable[[], bool] = lambda: False
        self._publish = publish
        self._last_good = self._snapshot()
        self._version = history.head
        # Disagreement of every step on the stream: since the last check by the guard; and of steps
        # that passed it and are in no version because the disk is full.
        self._unchecked_steps: list[float] = []
        self._unsaved_steps: list[float] = []
        self._unchecked_samples: list[StreamSample] = []  # of the steps since the last check
        self._last_change = time.monotonic()
        self.adaptation_off = self._find_uncovered_classes()
        self._baseline_weights = copy_answering_weights(learner_after_session(learner, history))
        self.signals.drift = measure_drift(self.learner, self._baseline_weights)
        self._stream = Stream(settings)
        self._commands: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._condition = threading.Condition()  # its lock is reentrant
        self._is_closing = self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    # Called from other threads

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Number of images in the queue of the stream."""
        return len(self._stream)

    def offer(self, pixels: Tensor, predictions: Sequence[Prediction], caller: str = "") -> None:
        """Queue images that were answered for adaptation; without room some are skipped.

        Args:
            pixels: `uint8 [n, 3, H, W]`.
            predictions: What was answered, one per image.
            caller: Who sent them.
        """
        is_off = not self.settings.adapt or self.frozen or self.adaptation_off
        if is_off or not self.learner.adapts:
            return
        if caller in self.guard.left_out:
            self.signals.skipped += len(predictions)
            return
        now = time.monotonic()
        with self._condition:
            for image, p in zip(pixels, predictions, strict=True):
                # A view would keep the images of its whole request in memory.
                sample = StreamSample(image.clone(), p.label, p.score, now, caller)
                self.signals.skipped += self._stream.put(sample)
            self._condition.notify()

    def learn(
        self,
        images: Mapping[str, Tensor],
        caller: str,
        on_failure: Callable[[], None] = lambda: None,
        options: SessionOptions | None = None,
    ) -> Job:
        """Queue a session.

        Args:
            images: By class name, each `uint8 [n, 3, H, W]`.
            caller: For the audit log.
            on_failure: Called when the session ends without a version.
            options: How it trains, if not as the learner's settings say.

        Returns:
            The job, which tells about its progress.

        Raises:
            BusyError: Too many sessions wait.
            InputError: The learner would know too many classes, or only one.
            TooLargeError: The session itself has too many.
        """
        limit = self.settings.max_session_classes
        if len(images) > limit:
            raise TooLargeError(
                f"the session has {len(images)} classes; at most {limit} are trained together, so "
                "send them in several sessions (the setting max_session_classes)"
            )
        session = self.learner.make_session(images)
        with self._condition:
            waiting = [job.classes for job in self.jobs.values() if not job.ended.is_set()]
            classes = set(self.learner.classes).union(images, *waiting)
            if len(classes) > self.settings.max_classes:
                raise InputError(
                    f"the session would make {len(classes)} classes, with those of sessions that "
                    f"wait; at most {self.settings.max_classes} are allowed (--max-classes)"
                )
            if len(classes) == 1 and self.learner.needs_two_classes:
                raise InputError(describe_only_class(*classes))
            if sum(job.state == "waiting" for job in self.jobs.values()) >= self.settings.max_jobs:
                raise BusyError(f"{self.settings.max_jobs} sessions wait already; try again later")
            job = Job(
                list(images),
                len(session.train),
                caller,
                session,
                on_failure,
                options or SessionOptions(),
            )
            self.submit(lambda: self._run_session(job))  # first: it raises if the writer has ended
            self.jobs[job.id] = job
            ended = [old.id for old in self.jobs.values() if old.ended.is_set()]
            for old in ended[:-KEPT_JOBS]:
                del self.jobs[old]
        return job

    def cancel(self, job: Job) -> bool:
        """Cancel a session, which ends after its current step; return whether it was going on."""
        with self._condition:
            is_going_on = not (job.ended.is_set() or job.cancelled.is_set())
            job.cancelled.set()
        return is_going_on

    def freeze(self, reason: str) -> bool:
        """Stop adaptation at once, whatever the writer does; return whether it was not stopped.

        Steps that were taken are checked, and published if they pass, when the writer has time.
        """
        with self._freeze_lock:
            if self.frozen:
                return False
            self._stop_adapting(reason)
        with contextlib.suppress(BusyError):  # the writer ends, and saves them then
            self.submit(lambda: self._close_interval(may_search=False))
        return True

    def unfreeze(self) -> bool:
        """Start adaptation again, from all callers; return whether it was stopped."""
        with self._freeze_lock:
            was_frozen = bool(self.frozen or self.guard.left_out)
            self.frozen = ""
            self.guard.start_session()
            self._save_freeze()
        return was_frozen

    def submit(self, command: Callable[[], T]) -> "Future[T]":
        """Queue a command that the writer runs between two steps.

        Raises:
            BusyError: The writer is stopping.
            UnavailableError: It has ended by an error.
        """
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(command())
            except DosappError as error:
                result.set_exception(error)
            except BaseException as error:
                result.set_exception(error)
                raise  # so that the writer returns to the last good state

        with self._condition:
            if self._has_failed:
                raise UnavailableError(WRITER_ENDED)
            if self._is_closing:
                raise BusyError("the service is stopping; try again when it has restarted")
            self._commands.append((run, result))
            self._condition.notify()
        return result

    def close(self) -> None:
        """End after the current step: sessions are cancelled, steps on the stream are saved."""
        with self._condition:
            self._is_closing = True
            for job in self.jobs.values():
                job.cancelled.set()
            self._condition.notify()
        self._thread.join()

    # Commands, run by the writer's thread

    def rollback(self, number: int, caller: str) -> int:
        """Restore a version as a new version on top, and return the new number."""
        self._close_interval(may_search=False)
        self.learner = self._learner_at(number)
        self._clear_stream()
        return self._append_change(f"rolled back to version {number}", caller)

    def rename(self, old: str, new: str, caller: str) -> int:
        """Rename a class as a new version, and return its number."""
        self._close_interval(may_search=False)
        self.learner.rename(old, new)
        return self._append_change(f"renamed '{old}' to '{new}'", caller)

    def remove(self, name: str, caller: str) -> int:
        """Remove a class as a new version, and return its number."""
        self._close_interval(may_search=False)
        self.learner.remove(name)
        self._clear_stream()  # predictions in the queue may have its label
        return self._append_change(f"removed '{name}'", caller)

    def _stop_adapting(self, reason: str) -> None:
        self.frozen = reason
        self._clear_stream()
        self._save_freeze()

    def _save_freeze(self) -> None:
        try:
            with self._freeze_lock:
                values = {"frozen": self.frozen, "left_out": self.guard.left_out}
                write_json(self._freeze_file, values)
            self.freeze_error = ""
        except StorageError as error:
            now = "frozen" if self.frozen else "no longer frozen"
            if self.guard.left_out:
                now = f"{now}, and learns nothing from {', '.join(self.guard.left_out)}"
            self.freeze_error = f"it is {now}, but a restart would not know that: {error}"
            self._last_change = time.monotonic()
            logger.warning("%s", self.freeze_error)

    def _append_change(self, reason: str, caller: str) -> int:
        """Append a version for a change without training; undo the change if that fails."""
        measured = self._describe(self._measure_canary())
        try:
            number = self._append(self._snapshot(), reason, {**measured, "who": caller})
        except DosappError:
            self._restore_last_good()
            raise
        self._start_drift()
        return number

    # The thread

    def _run(self) -> None:
        torch.set_num_threads(thread_count(self.settings))
        with contextlib.suppress(OSError, AttributeError):  # predictions have priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            self._loop()
            self.finish()
        finally:
            self._fail_waiting()

    def _loop(self) -> None:
        while True:
            with self._condition:
                command = self._commands.popleft()[0] if self._commands else None
                batch = self._next_batch() if command is None and not self._is_closing else None
                if command is None and batch is None:
                    if self._is_closing:
                        break
                    self._condition.wait(self._wait_seconds())
                    batch = self._next_batch() if not self._commands else None
            with self._recovering():
                if command is not None:
                    command()
                elif batch:
                    self.adapt(batch)
                elif self._has_unsaved and self._idle_seconds() >= self.settings.interval_wait:
                    self._close_interval()

    def run_waiting(self) -> None:
        """Run all that waits in the calling thread, for a writer that was not started."""
        while self._commands:
            self._commands.popleft()[0]()
        while batch := self._next_batch():
            self.adapt(batch)

    def _fail_waiting(self) -> None:
        """End commands and sessions that still wait when the thread ends, even by an error."""
        with self._condition:
            self._has_failed = not self._is_closing
            self._is_closing = True
            waiting = [result for _, result in self._commands]
            self._commands.clear()
        for result in waiting:
            result.set_exception(UnavailableError(WRITER_ENDED))
        for job in self.jobs.values():
            if not job.ended.is_set():
                job.end("failed", WRITER_ENDED)

    def finish(self) -> None:
        """Publish the steps of an interval that has begun."""
        with self._recovering():
            self._close_interval()

    @contextlib.contextmanager
    def _recovering(self) -> Iterator[None]:
        """Log any error, return to the last good state and go on."""
        try:
            yield
        except Exception as error:
            self.last_error = f"{type(error).__name__}: {error}"
            logger.exception("unexpected error; returning to version %d", self._version)
            self._restore_last_good()

    def _next_batch(self) -> list[StreamSample] | None:
        """Take a full batch, or a smaller one after `adapt_wait`; none while requests wait."""
        stream, size = self._stream, self.settings.adapt_batch_size
        if not len(stream) or self.is_reader_behind():
            return None
        is_due = time.monotonic() - stream.oldest >= self.settings.adapt_wait
        return stream.take(1 if is_due else size, self.guard.caller_share)

    @property
    def _has_unsaved(self) -> bool:
        return bool(self._unchecked_steps or self._unsaved_steps or self.freeze_error)

    def _idle_seconds(self) -> float:
        return time.monotonic() - self._last_change

    def _wait_seconds(self) -> float:
        """Seconds until something is due although no command came."""
        waits = [60.0]
        if len(self._stream) >= self.settings.adapt_batch_size:  # the reader is behind
            waits.append(READER_CHECK_INTERVAL)
        elif len(self._stream):
            due = self._stream.oldest + self.settings.adapt_wait - time.monotonic()
            waits.append(due if due > 0 else 1.0)  # they wait for images of other callers
        if self._has_unsaved:
            waits.append(self.settings.interval_wait - self._idle_seconds())
        return max(0.0, min(waits))

    # The stream

    def adapt(self, batch: list[StreamSample]) -> None:
        """Take one step on a batch of the stream, if the guard trusts it."""
        signals = self.signals
        if self.frozen:
            signals.skipped += len(batch)
            return
        signals.labels.append(Counter(sample.label for sample in batch))
        signals.confidence.append(sum(sample.score for sample in batch) / len(batch))
        trusted = self.guard.choose_trusted(batch, len(self.learner.classes))
        signals.held += len(batch) - len(trusted)
        batch = trusted
        if not batch:
            return
        self._unchecked_samples += batch
        try:
            result = self.learner.adapt(torch.stack([sample.pixels for sample in batch]))
        except DivergedError as error:
            self._refuse_interval(str(error))
            return
        if result is None or not result.stepped:  # the gate left too few images for a step
            del self._unchecked_samples[-len(batch) :]
            signals.held += len(batch)
            return
        signals.held += result.gated
        signals.adapted += len(batch) - result.gated
        self._last_change = time.monotonic()
        signals.disagreement.append(result.disagreement)
        self._unchecked_steps.append(result.disagreement)
        if len(self._unchecked_steps) >= self.settings.interval:
            self._close_interval()

    def _close_interval(self, may_search: bool = True) -> None:
        """Publish the steps on the stream or undo them; write what the disk had no room for.

        Args:
            may_search: Whether there is time to find out who is responsible for a refusal. A
                command does not wait for that.
        """
        if self.freeze_error:
            self._save_freeze()
        if not (self._unchecked_steps or self._unsaved_steps):
            return
        canary = self._measure_canary()
        measured = self._describe(canary)
        if self._unchecked_steps:
            disagreement = mean_disagreement(self.learner.method, self._unchecked_steps)
            reason = self.guard.check_interval(disagreement, canary)
            if reason is not None:
                self._refuse_interval(reason, may_search)
                return
            self.guard.accept({sample.caller for sample in self._unchecked_samples})
            self._unchecked_samples = []
            self._last_good = self._snapshot()  # even if it cannot be written now
            self._unsaved_steps, self._unchecked_steps = (
                self._unsaved_steps + self._unchecked_steps,
                [],
            )
        steps = self._unsaved_steps
        measured["disagreement"] = _mean(steps)
        try:
            self._append(self._last_good, f"{plural(len(steps), 'step')} on the stream", measured)
        except (DosappError, OSError) as error:  # go on, and try again after an interval
            self.last_error, self._last_change = str(error), time.monotonic()
            logger.warning("not saved: %s on the stream: %s", plural(len(steps), "step"), error)

    def _refuse_interval(self, reason: str, may_search: bool = True) -> None:
        responsible = self._find_responsible() if may_search else None
        self._restore_last_good()
        self.signals.refused += 1
        left_out = self.guard.refuse(responsible or [])
        logger.warning("interval refused, version %d stays: %s", self._version, reason)
        by = {"by": responsible} if responsible else {}
        self.on_event("refused", {"why": reason, "version": self._version, **by})
        for caller in left_out:
            with self._condition:
                self.signals.skipped += self._stream.drop_caller(caller)
            times = f"{self.settings.max_refusals} times more often than accepted"
            why = f"its images were refused {times}: {reason}"
            logger.warning("'%s' is left out of the stream: %s", caller, why)
            self.on_event("left out", {"caller": caller, "why": why, "version": self._version})
        if left_out:
            self._save_freeze()
            # Honest images alone would go on from weights that were led astray.
            names = ", ".join(f"'{name}'" for name in left_out)
            self._return_to_session(f"{names} is left out")
        elif responsible == [] and self._return_to_session("no caller's images are harmful alone"):
            self.guard.undone += 1
        if self.guard.must_freeze:
            refusals, undone = self.guard.refusals, self.guard.undone
            times = f"{refusals} intervals in a row"
            if undone > refusals:
                times = f"the stream {undone} times since the last session"
            self._stop_adapting(f"refused {times}: {reason}")
            logger.warning("adaptation is frozen: %s", self.frozen)
            self.on_event("froze", {"why": self.frozen, "version": self._version})

    def _return_to_session(self, why: str) -> bool:
        """Undo what was published since the last session; return whether there was anything."""
        number = find_session_version(self.learner, self.history)
        if not number or number == self._version:
            return False
        try:
            self.learner = self._learner_at(number)
            self._append_change(f"returned to version {number}: {why}", "guard")
        except DosappError as error:
            self._restore_last_good()
            self._stop_adapting(f"the stream cannot be undone, though {why}: {error}")
        return True

    def _learner_at(self, number: int) -> Learner:
        """The learner at a version, with replayed images and a baseline of the whole canary."""
        learner = self.learner.rollback_copy(self.history.at(number))
        canary = learner.canary
        if canary.lacks_baselines:  # the search reads every version
            canary.add_missing_baselines(learner_after_session(learner, self.history, number))
        return learner

    def _find_responsible(self) -> list[str] | None:
        """Find the callers whose images of the interval, learned from alone, are refused too.

        Returns:
            These callers; None if there was no time to try, or a version cannot be read now.
        """
        by_caller: dict[str, list[Tensor]] = {}
        for sample in self._unchecked_samples:
            by_caller.setdefault(sample.caller, []).append(sample.pixels)
        try:
            number = find_session_version(self.learner, self.history)
            if len(by_caller) == 1 and number == self._version and not self._unsaved_steps:
                return list(by_caller)  # the trial would repeat the interval
            state = self._learner_at(number).state() if number else self._last_good[0]
        except (DosappError, OSError) as error:
            logger.warning("no caller can be tried alone: %s", error)
            return None
        trials = Trials(
            self.guard,
            is_reader_behind=self.is_reader_behind,
            must_stop=lambda: bool(self._commands) or self._is_closing,
        )
        return trials.find_refused(by_caller, lambda: self.learner.at(state.clone()))

    def _measure_canary(self) -> CanaryGaps:
        return self.learner.canary.measure(self.learner)

    def _describe(self, canary: CanaryGaps) -> dict[str, Any]:
        """Measure the drift, and return it with the canary for the header of the next version."""
        self.signals.drift = measure_drift(self.learner, self._baseline_weights)
        measured: dict[str, Any] = {"drift": self.signals.drift}
        if not len(canary):
            return measured
        margin = (canary.margins - canary.baseline_margins).mean().item()
        pull = canary.pull.max().item()
        return {**measured, "canary": canary.accuracy, "margin": margin, "pull": pull}

    def _find_uncovered_classes(self) -> str:
        """Return why no guard would notice harm to a class, "" if one would."""
        learner = self.learner
        missing = [name for name in learner.classes if name not in learner.canary.compared_classes]
        if not self.settings.require_canary or not missing:
            return ""
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return (
            f"adaptation is off: the canary has no image of '{missing[0]}'{more}; train with "
            "canary_share above 0, give --canary FOLDER, or adapt at your own risk with "
            "--no-require-canary"
        )

    def _clear_stream(self) -> None:
        with self._condition:
            self.signals.skipped += len(self._stream)
            self._stream.clear()

    # Sessions

    def _run_session(self, job: Job) -> None:
        assert job.session is not None
        try:
            self._close_interval(may_search=False)
            earlier_classes = self.learner.classes
            if job.cancelled.is_set():
                raise SessionCancelledError
            options, learner = job.options, self.learner
            session = learner.canary.take_share(
                job.session, self.settings.canary_share, options.must_train
            )
            kept = len(job.session.train) - len(session.train)
            job.state, remarks = "learning", learner.session_warnings(session)
            if kept:
                remarks = [f"{kept} kept for the canary", *remarks]
            before = self._measure_canary().among(earlier_classes)
            for step in learner.training_steps(session, lr=options.lr, epochs=options.epochs):
                job.step, job.total_steps, job.loss = step.number, step.total, step.loss
                if job.cancelled.is_set():
                    raise SessionCancelledError
            canary = self._measure_canary()
            refusal = self.guard.check_session(before, canary.among(earlier_classes))
            if refusal is not None:
                self._undo_session(job, "refused", f"not published: {refusal}")
                return
            if learner.stores_images:
                record_stored_images(self.history.folder)
            names = ", ".join(job.classes[:3]) + (", …" if len(job.classes) > 3 else "")
            details = {**self._describe(canary), "who": job.caller}
            if job.cancelled.is_set():  # while the canary was measured
                raise SessionCancelledError
            job.version = self._append(self._snapshot(), f"learned {names}", details)
            self._start_drift()
            self._forgive_callers()
        except SessionCancelledError:
            self._undo_session(job, "cancelled", "nothing changed")
        except DosappError as error:
            self._undo_session(job, "failed", str(error))
        except Exception as error:
            logger.exception("unexpected error in session %s", job.id)
            self._undo_session(job, "failed", f"{type(error).__name__}: {error}")
        else:
            self.on_event("taught", {"job": job.id, "who": job.caller, "version": job.version,
                                     "classes": job.classes, "images": job.images})  # fmt: skip
            counts = f"{plural(len(job.classes), 'class')}, {plural(job.images, 'image')}"
            job.end("done", "; ".join([counts, *remarks]))

    def _undo_session(
        self, job: Job, state: Literal["refused", "failed", "cancelled"], reason: str
    ) -> None:
        """Return to the state before the session and end its job."""
        self._restore_last_good()
        if state != "cancelled":  # that is logged where it is asked for
            logger.warning("session %s of %s %s: %s", job.id, job.caller, state, reason)
            details = {"job": job.id, "who": job.caller, "why": reason, "version": self._version}
            self.on_event(state, details)
        job.end(state, reason)

    # Versions

    def _append(
        self, snapshot: tuple[State, State], reason: str, measured: Mapping[str, Any]
    ) -> int:
        """Append a version to the history and publish it."""
        state, working = snapshot
        number = self.history.append(state, working, reason, measured)
        self._last_good, self._version, self.last_error = snapshot, number, ""
        self._unchecked_steps, self._unsaved_steps, self._unchecked_samples = [], [], []
        self.adaptation_off = self._find_uncovered_classes()
        if "canary" in measured:
            self.signals.canary.append((number, measured["canary"]))
        self._publish(Published(number, self.learner.at(state, trainable=False)))
        logger.info("version %d: %s", number, reason)
        if number - self.history.oldest >= self.settings.keep_versions * 5 // 4:
            try:
                self.history.prune(self.settings.keep_versions)
            except (DosappError, OSError) as error:  # the new version is written all the same
                self.last_error = str(error)
                logger.warning("old versions cannot be merged: %s", error)
        return number

    def _snapshot(self) -> tuple[State, State]:
        return self.learner.state().clone(), self.learner.working_state().clone()

    def _restore_last_good(self) -> None:
        """Return to the last good state: that of a version, or of steps not yet saved."""
        state, working = self._last_good
        self.learner = self.learner.at(state.clone(), working.clone())
        self._unchecked_steps, self._unchecked_samples = [], []

    def _forgive_callers(self) -> None:
        """Learn from all callers again, after a session."""
        had_left_out = bool(self.guard.left_out)
        self.guard.start_session()
        if had_left_out:
            self._save_freeze()

    def _start_drift(self) -> None:
        """Count drift and refusals from here on."""
        self._baseline_weights = copy_answering_weights(self.learner)
        self.signals.drift, self.guard.refusals = 0.0, 0


def _read_frozen(path: Path) -> tuple[str, list[str]]:
    """Why adaptation was stopped before a restart, and which callers were left out."""
    values = read_json(path)
    values = values if isinstance(values, dict) else {}
    frozen, left_out = values.get("frozen"), values.get("left_out", [])
    is_list = isinstance(left_out, list) and all(isinstance(name, str) for name in left_out)
    if not isinstance(frozen, str) or not is_list:
        raise CorruptRecordError(
            f"'{path}' does not say whether adaptation is frozen; delete it if it is not"
        )
    return frozen, left_out


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
