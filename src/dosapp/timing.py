"""What runs cost: a few steps to estimate a grid, whole sessions in turns to compare methods.

The machine may be shared, so comparisons are made inside one process, session by session in
turns, and read as ratios.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dosapp.learner import Learner
from dosapp.peak import forget_peak, peak
from dosapp.plan import Plan, plan
from dosapp.settings import RunSettings, key_of
from dosapp.storage import read_json, write_json
from dosapp.streams import Session

ALIKE = {"seed", "stream_noise", "test_noise", "correlated", "one_class"}  # cost nothing
LOOK = 4  # steps of each phase; the first one warms up and is not counted


@dataclass(frozen=True)
class Estimate:
    runs: int
    seconds: float  # one after the other
    memory: float | None  # MB, of the largest


def estimate(planned: Sequence[RunSettings]) -> Estimate:
    """From a few steps of each kind of run, times its number of steps."""
    kinds: dict[str, list[RunSettings]] = {}
    for one in planned:
        kind = one.model_dump_json(exclude=ALIKE)
        kinds.setdefault(kind, []).append(one)
    seconds, most = 0.0, 0.0
    for same in kinds.values():
        forget_peak()
        seconds += len(same) * _seconds(plan(same[0]))
        most = max(most, peak() or 0.0)
    return Estimate(len(planned), seconds, most or None)


def _seconds(planned: Plan) -> float:
    s, stream = planned.settings, planned.stream
    learner = Learner(s.learner().model_copy(update={"epochs": 1}), planned.net)
    sessions = [stream.session(t) for t in range(len(stream.groups))]
    taught = sum(len(x.train) // min(s.batch, len(x.train)) for x in sessions) * s.epochs
    streamed = sum(-(-len(x.unlabelled) // s.stream_batch) for x in sessions)
    first = sessions[0]
    few = np.linspace(0, len(first.train) - 1, min(len(first.train), LOOK * s.batch)).astype(
        np.int64
    )
    lessons = learner.lessons(replace(first, train=first.train.only(few)))
    lesson = _median(lambda: next(lessons, None))
    for _ in lessons:  # the stream begins when the session has ended
        pass
    batches = first.unlabelled.batches(s.stream_batch)
    adapt = _median(lambda: learner.adapt(next(batches, learner.pixels([]))))
    return lesson * taught + adapt * streamed


def _median(step: Callable[[], object]) -> float:
    taken = []
    for _ in range(LOOK):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return float(np.median(taken[1:]))


def in_turns(rows: dict[str, RunSettings], folder: Path, measure: bool) -> dict[str, Any] | None:
    """Seconds of every session, each method in turn before anybody goes on; kept in the folder."""
    plans = {name: plan(settings) for name, settings in rows.items()}
    place = folder / f"time-{key_of({n: p.identity for n, p in plans.items()})}.json"
    if place.exists():
        found: dict[str, Any] = read_json(place)
        return found
    if not measure:
        return None
    learners = {n: Learner(p.settings.learner(), p.net) for n, p in plans.items()}
    taken: dict[str, list[float]] = {name: [] for name in rows}
    for t in range(min(len(p.stream.groups) for p in plans.values())):
        order = list(rows)
        for name in order if t % 2 == 0 else reversed(order):
            session, settings = plans[name].stream.session(t), plans[name].settings
            start = time.perf_counter()
            _live(learners[name], session, settings.stream_batch)
            taken[name].append(round(time.perf_counter() - start, 3))
    result = {"seconds": taken, "keys": {name: p.key for name, p in plans.items()}}
    write_json(place, result)
    return result


def _live(learner: Learner, session: Session, size: int) -> None:
    learner.learn(session)
    for pixels in session.unlabelled.batches(size):
        learner.adapt(pixels)
