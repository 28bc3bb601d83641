"""The one thread that owns the weights: lessons, the stream, rollbacks, one after the other.

Readers never see it at work. What it has learned becomes visible as a version: written,
acknowledged by a checkpoint, then published whole. A version comes after every session and after
every interval of steps on the stream, so a crash loses at most one interval, and no session that
was reported done.
"""

import contextlib
import itertools
import os
import secrets
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from dosapp.errors import BusyError, DivergedError, DosappError, InputError, StorageError
from dosapp.history.history import History
from dosapp.history.record import State
from dosapp.learner.learner import Learner, Prediction
from dosapp.runtime.files import read_json, write_json
from dosapp.scenario import Session
from dosapp.service.guards import Canary, Guard, Signals
from dosapp.service.reader import Published, threads
from dosapp.service.settings import ServiceSettings

T = TypeVar("T")
REMEMBERED = 100  # jobs that have ended
ENDED = "the writer has ended, so this will not be done; start the service again"


@dataclass
class Job:
    """A lesson on its way."""

    classes: list[str]
    images: int
    who: str
    session: Session | None
    given_back: Callable[[], None]  # what was taken for it, if nothing comes of it
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: Literal["waiting", "learning", "done", "refused", "failed", "cancelled"] = "waiting"
    step: int = 0
    of: int = 0
    loss: float | None = None
    version: int | None = None
    said: str = ""
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def end(self, state: Literal["done", "refused", "failed", "cancelled"], said: str) -> None:
        if state != "done":
            self.given_back()
        self.state, self.said, self.session, self.given_back = state, said, None, lambda: None
        self.ended.set()

    def facts(self) -> dict[str, Any]:
        names = ("id", "state", "classes", "images", "step", "of", "loss", "version", "said")
        return {name: getattr(self, name) for name in names}


BREATH = 0.02  # seconds between two looks whether answers still wait


@dataclass(frozen=True)
class StreamSample:
    """A picture of the stream, and what was answered about it."""

    pixels: Tensor  # uint8 [3, H, W]
    label: str
    score: float
    at: float  # monotonic


class Cancelled(Exception):
    pass


class Writer:
    def __init__(
        self,
        learner: Learner,
        history: History,
        settings: ServiceSettings,
        publish: Callable[[Published], None],
        canary: Canary | None = None,
    ) -> None:
        self.settings, self.history, self.canary = settings, history, canary
        self.learner = learner
        self.signals, self.guard = Signals(), Guard(settings)
        self._place = history.folder / "service.json"
        # Why adaptation rests; "" if it does not. It is so at once, written or not.
        self.frozen: str = read_json(self._place)["frozen"] if self._place.exists() else ""
        self.unkept = ""  # why a restart would not know that
        self.trouble = ""  # what else could not be written
        self.jobs: dict[str, Job] = {}
        self.watch: Callable[[str, Mapping[str, Any]], None] = lambda what, facts: None
        self.pressed: Callable[[], bool] = lambda: False  # do answers wait? Then the stream does
        self._publish = publish
        self._good = self._now()  # what is returned to
        self._number = history.head
        self._steps: list[
            float
        ] = []  # on the stream, not judge_claim yet: how far experts differed
        self._owed: list[float] = []  # judge_claim good, and not in a version for want of room
        self._changed = time.monotonic()
        self._session_canary = self._right()
        self._session_weights = _answering(learner)
        self._stream: deque[StreamSample] = deque()
        self._orders: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._turn = threading.Condition()  # of a lock that its holder may take again
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="writer", daemon=True)

    # Asked from other threads

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Pictures of the stream."""
        return len(self._stream)

    def offer(self, pixels: Tensor, answers: list[Prediction]) -> int:
        """Pictures that were answered join the stream; says how many there was room for."""
        if not self.settings.adapt or self.frozen or not self.learner.method.adapts:
            return 0
        now = time.monotonic()
        with self._turn:
            room = max(0, self.settings.max_queue - len(self._stream))
            for picture, answer in itertools.islice(zip(pixels, answers, strict=True), room):
                self._stream.append(StreamSample(picture, answer.label, answer.score, now))
            taken = min(room, len(answers))
            self.signals.skipped += len(answers) - taken
            self._turn.notify()
        return taken

    def teach(
        self,
        pictures: Mapping[str, Tensor],
        who: str,
        given_back: Callable[[], None] = lambda: None,
    ) -> Job:
        session = self.learner.session(pictures)
        known = set(self.learner.classes) | set(pictures)
        if len(known) > self.settings.max_classes:
            raise InputError(
                f"the lesson would make {len(known)} classes; at most {self.settings.max_classes} "
                "are allowed (the setting 'classes')"
            )
        with self._turn:
            if sum(job.state == "waiting" for job in self.jobs.values()) >= self.settings.max_jobs:
                raise BusyError(f"{self.settings.max_jobs} lessons wait already; try again later")
            job = Job(list(pictures), len(session.train), who, session, given_back)
            self.ask(lambda: self._teach(job))  # or nobody hears of the job
            self.jobs[job.id] = job
            ended = [old.id for old in self.jobs.values() if old.ended.is_set()]
            for old in ended[:-REMEMBERED]:
                del self.jobs[old]
        return job

    def cancel(self, job: Job) -> None:
        job.cancelled.set()

    def ask(self, order: Callable[[], T]) -> "Future[T]":
        """Something for the writer to do between two steps."""
        done: Future[T] = Future()

        def carried_out() -> None:
            try:
                done.set_result(order())
            except DosappError as error:
                done.set_exception(error)
            except BaseException as error:
                done.set_exception(error)
                raise  # what was half done is not kept

        with self._turn:
            if self._closing:
                raise BusyError("the service is stopping")
            self._orders.append((carried_out, done))
            self._turn.notify()
        return done

    def close(self) -> None:
        """End after the current step: lessons on their way are given up, the stream is saved."""
        with self._turn:
            self._closing = True
            for job in self.jobs.values():
                job.cancelled.set()
            self._turn.notify()
        self._thread.join()

    # Orders, carried out by the writer

    def rollback(self, number: int, who: str) -> int:
        """What a version was, as a new version on top."""
        self._close_interval()
        self.learner = self.learner.rolled_back(self.history.at(number))
        self._forget_stream()
        return self._changed_by_hand(f"rolled back to version {number}", who)

    def rename(self, old: str, new: str, who: str) -> int:
        self._close_interval()
        self.learner.rename(old, new)
        return self._changed_by_hand(f"renamed '{old}' to '{new}'", who)

    def remove(self, name: str, who: str) -> int:
        self._close_interval()
        self.learner.remove(name)
        self._forget_stream()  # it may be among the answers
        return self._changed_by_hand(f"removed '{name}'", who)

    def freeze(self, why: str) -> int:
        """Adaptation rests. What the stream has taught so far is kept if it is good."""
        if not self.frozen:
            self._close_interval()
            self._rest(why)
        return self._number

    def unfreeze(self) -> int:
        self.frozen, self.guard.strikes = "", 0
        self._keep_frozen()
        return self._number

    def _rest(self, why: str) -> None:
        self.frozen = why
        self._forget_stream()
        self._keep_frozen()

    def _keep_frozen(self) -> None:
        try:
            write_json(self._place, {"frozen": self.frozen})
            self.unkept = ""
        except StorageError as error:
            now = "frozen" if self.frozen else "no longer frozen"
            self.unkept = f"it is {now}, but a restart would not know that: {error}"
            self._changed = time.monotonic()

    def _changed_by_hand(self, reason: str, who: str) -> int:
        seen = self._measured()
        try:
            number = self._commit(self._now(), reason, {**seen, "who": who})
        except DosappError:
            self._return()
            raise
        self._begin_anew(seen)
        return number

    # The thread

    def _work(self) -> None:
        torch.set_num_threads(threads(self.settings))
        with contextlib.suppress(OSError, AttributeError):  # answers come first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            self._work_on()
            self.finish()
        finally:
            self._leave()

    def _work_on(self) -> None:
        while True:
            with self._turn:
                order = self._orders.popleft()[0] if self._orders else None
                batch = self._batch() if order is None and not self._closing else None
                if order is None and batch is None:
                    if self._closing:
                        break
                    self._turn.wait(self._patience())
                    batch = self._batch() if not self._orders else None
            with self._going_on():
                if order is not None:
                    order()
                elif batch:
                    self.adapt(batch)
                elif self._unwritten and self._idle() >= self.settings.interval_wait:
                    self._close_interval()

    def _leave(self) -> None:
        """Nobody waits for a writer that has ended, though it may have died: then orders and
        lessons are left."""
        with self._turn:
            self._closing = True
            left = [done for _, done in self._orders]
            self._orders.clear()
        for done in left:
            done.set_exception(BusyError(ENDED))
        for job in self.jobs.values():
            if not job.ended.is_set():
                job.end("failed", ENDED)

    def finish(self) -> None:
        """Publish what a started interval has taught."""
        with self._going_on():
            self._close_interval()

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Whatever goes wrong, the service stands: the last good state is taken up again."""
        try:
            yield
        except Exception as error:
            self.trouble = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            self._return()

    def _batch(self) -> list[StreamSample] | None:
        """A full batch, or what there is when the first of it has waited long enough; none while
        answers wait."""
        size, waiting = self.settings.adapt_batch_size, self._stream
        old = waiting and time.monotonic() - waiting[0].at >= self.settings.adapt_wait
        if (len(waiting) < size and not old) or self.pressed():
            return None
        return [waiting.popleft() for _ in range(min(size, len(waiting)))]

    @property
    def _unwritten(self) -> bool:
        return bool(self._steps or self._owed or self.unkept)

    def _idle(self) -> float:
        return time.monotonic() - self._changed

    def _patience(self) -> float:
        """Seconds until something has to be done although nobody asks."""
        left = [60.0]
        if len(self._stream) >= self.settings.adapt_batch_size:  # answers come first
            left.append(BREATH)
        elif self._stream:
            due = self._stream[0].at + self.settings.adapt_wait - time.monotonic()
            left.append(max(BREATH, due))
        if self._unwritten:
            left.append(self.settings.interval_wait - self._idle())
        return max(0.0, min(left))

    # The stream

    def adapt(self, batch: list[StreamSample]) -> None:
        signals = self.signals
        if self.frozen:
            signals.skipped += len(batch)
            return
        signals.labels.append(Counter(seen.label for seen in batch))
        signals.confidence.append(sum(seen.score for seen in batch) / len(batch))
        if not self.guard.trusts([seen.label for seen in batch], len(self.learner.classes)):
            signals.held += len(batch)
            return
        steps = self.learner.student.steps
        try:
            guess = self.learner.adapt(torch.stack([seen.pixels for seen in batch]))
        except DivergedError as error:
            self._refuse(str(error))
            return
        if guess is None or self.learner.student.steps == steps:  # the gate kept all or all but one
            signals.held += len(batch)
            return
        gated = self.learner.mitigations.gated
        signals.held += gated
        signals.adapted += len(batch) - gated
        self._changed = time.monotonic()
        signals.disagreement.append(guess.disagreement)
        self._steps.append(guess.disagreement)
        if len(self._steps) >= self.settings.interval:
            self._close_interval()

    def _close_interval(self) -> None:
        """Publish what the stream has taught, or take it back; what found no room may find it."""
        if self.unkept:
            self._keep_frozen()
        if not (self._steps or self._owed):
            return
        seen = self._measured()
        if self._steps:
            right = self._session_canary, seen.get("canary")
            why = self.guard.against_interval(_mean(self._steps), *right)
            if why is not None:
                self._refuse(why)
                return
            self.guard.strikes = 0
            self._good = self._now()  # whatever comes next, and whether it can be written or not
            self._owed, self._steps = self._owed + self._steps, []
        try:
            reason = f"{len(self._owed)} steps on the stream"
            self._commit(self._good, reason, {**seen, "disagreement": _mean(self._owed)})
        except StorageError as error:  # go on, and try again after an interval
            self.trouble, self._changed = str(error), time.monotonic()

    def _refuse(self, why: str) -> None:
        self._return()
        self.signals.refused += 1
        self.guard.strikes += 1
        self.watch("refused", {"why": why, "version": self._number})
        if self.guard.strikes >= self.settings.max_refusals:
            self._rest(f"refused {self.guard.strikes} intervals in a row: {why}")
            self.watch("froze", {"why": self.frozen, "version": self._number})

    def _measured(self) -> dict[str, Any]:
        now = _answering(self.learner)
        old = self._session_weights
        gaps = [float((now[n] - old[n]).norm()) for n in now if n in old]
        self.signals.drift = sum(gap**2 for gap in gaps) ** 0.5
        seen: dict[str, Any] = {"drift": self.signals.drift}
        right = self._right()
        return seen if right is None else {**seen, "canary": right}

    def _right(self, among: Sequence[str] | None = None) -> float | None:
        """Of the canary, in per cent; None if there is nothing to ask about."""
        return self.canary.accuracy(self.learner, among) if self.canary else None

    def _forget_stream(self) -> None:
        with self._turn:
            self.signals.skipped += len(self._stream)
            self._stream.clear()

    # Lessons

    def _teach(self, job: Job) -> None:
        assert job.session is not None
        try:
            self._close_interval()
            known = self.learner.classes
            if job.cancelled.is_set():
                raise Cancelled
            job.state, remarks = "learning", self.learner.session_warnings(job.session)
            right = self._right(known)
            for lesson in self.learner.training_steps(job.session):
                job.step, job.of, job.loss = lesson.number, lesson.of, lesson.loss
                if job.cancelled.is_set():
                    raise Cancelled
            seen = self._measured()
            why = self.guard.against_session(right, self._right(known))
            if why is not None:
                self._unteach(job, "refused", f"not published: {why}")
                return
            names = ", ".join(job.classes[:3]) + (", …" if len(job.classes) > 3 else "")
            facts = {**seen, "who": job.who}
            job.version = self._commit(self._now(), f"taught {names}", facts)
            self._begin_anew(seen)
        except Cancelled:
            self._unteach(job, "cancelled", "given up; nothing has changed")
        except DosappError as error:
            self._unteach(job, "failed", str(error))
        except Exception as error:  # the service goes on
            self._unteach(job, "failed", f"{type(error).__name__}: {error}")
        else:
            self.watch("taught", {"job": job.id, "who": job.who, "version": job.version,
                                  "classes": job.classes, "images": job.images})  # fmt: skip
            counted = f"{len(job.classes)} class(es), {job.images} picture(s)"
            job.end("done", "; ".join([counted, *remarks]))

    def _unteach(
        self, job: Job, state: Literal["refused", "failed", "cancelled"], why: str
    ) -> None:
        """As if the lesson had never begun."""
        self._return()
        if state != "cancelled":  # whoever cancelled has been written down
            self.watch(state, {"job": job.id, "who": job.who, "why": why, "version": self._number})
        job.end(state, why)

    # Versions

    def _commit(self, now: tuple[State, State], reason: str, seen: Mapping[str, Any]) -> int:
        """Write, acknowledge, publish."""
        state, working = now
        number = self.history.commit(state, reason, seen)
        self.history.checkpoint(state, working)
        self._good, self._number, self.trouble = now, number, ""
        self._steps, self._owed = [], []
        if "canary" in seen:
            self.signals.canary.append((number, seen["canary"]))
        self._publish(Published(number, self.learner.at(state, learns=False)))
        if number - self.history.oldest >= self.settings.keep_versions * 5 // 4:
            try:
                self.history.prune(self.settings.keep_versions)
            except (DosappError, OSError) as error:  # the version stands all the same
                self.trouble = str(error)
        return number

    def _now(self) -> tuple[State, State]:
        return _kept(self.learner.state()), _kept(self.learner.working_state())

    def _return(self) -> None:
        """To the last good state, as if nothing had been tried since: a version, or what is to be
        one when there is room."""
        self.learner = self.learner.at(_kept(self._good[0]), _kept(self._good[1]))
        self._steps = []

    def _begin_anew(self, seen: Mapping[str, Any]) -> None:
        """From here on the canary and the drift are compared with what is now."""
        self._session_weights, self._session_canary = _answering(self.learner), seen.get("canary")
        self.signals.drift, self.guard.strikes = 0.0, 0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _kept(state: State) -> State:
    return State({name: t.detach().clone() for name, t in state.tensors.items()}, state.facts)


def _answering(learner: Learner) -> dict[str, Tensor]:
    """The weights that have moved, of the expert that answers, or of the student in an ensemble,
    which has none of its own."""
    expert = next(iter(learner.method.experts(learner.student).values()))
    weights, moved = (
        expert.weights() or learner.student.backbone.weights(),
        learner.student.trained_names,
    )
    return {n: w.detach().clone() for n, w in weights.items() if n in moved}
