"""What runs cost: a few steps to estimate a grid, whole sessions in turns to compare methods.

The machine may be shared, so comparisons are made inside one process, session by session in
turns, and read as ratios. An estimate is no measurement: for this machine it is a few steps of each
kind of run times their number; for a GPU that is not here, the floating-point operations of these
steps and the bytes they move, over a share of what its maker promises.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dosapp.errors import unknown_name
from dosapp.experiments.plan import Plan, plan
from dosapp.experiments.run import describe_machine, timestamp
from dosapp.learner.inputs import read_pixels
from dosapp.learner.learner import Learner
from dosapp.runtime.files import read_json, write_json
from dosapp.runtime.process_memory import peak_memory, reset_peak_memory
from dosapp.scenario import Session
from dosapp.settings import RunSettings, hash_key

ALIKE = {"seed", "stream_noise", "test_noise", "correlated", "one_class"}  # cost nothing
LOOK = 4  # steps of each phase; the first one warms up and is not counted
GPUS = Path(__file__).parent / "gpus.yaml"
USED = {"compute": 0.4, "bandwidth": 0.7}  # shares of a GPU's peak that are assumed
CONTEXT = 600e6  # bytes that a process holds on a GPU before the first tensor


@dataclass(frozen=True)
class Estimate:
    runs: int
    seconds: float  # one after the other
    memory: float | None  # MB, of the largest


@dataclass(frozen=True)
class StepCost:
    """Steps of one kind in a run: lessons, the stream's, batches of an examination."""

    steps: float
    seconds: float  # of one, here
    operations: float = 0.0  # floating-point, of one
    kept: float = 0.0  # bytes of activations that one keeps for its backward


def estimate(planned: Sequence[RunSettings], gpu: str | None = None) -> Estimate:
    """From a few steps of each kind of run, times its number of steps."""
    if gpu is not None and gpu not in gpus():
        raise unknown_name("GPU", gpu, gpus())
    kinds: dict[str, list[RunSettings]] = {}
    for one in planned:
        kind = one.model_dump_json(exclude=ALIKE)
        kinds.setdefault(kind, []).append(one)
    seconds, most = 0.0, 0.0
    for same in kinds.values():
        reset_peak_memory()
        found, held = measure_step_costs(plan(same[0]), counted=gpu is not None)
        if gpu is None:
            each, memory = sum(part.steps * part.seconds for part in found), peak_memory() or 0.0
        else:
            each = sum(
                part.steps * estimate_gpu_seconds(gpu, part, held, same[0].precision) for part in found
            )
            memory = (CONTEXT + held + max(part.kept for part in found)) / 1e6
        seconds, most = seconds + len(same) * each, max(most, memory)
    return Estimate(len(planned), seconds, most or None)


def gpus() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = yaml.safe_load(GPUS.read_text())
    return found


def estimate_gpu_seconds(gpu: str, part: StepCost, held: float, precision: str) -> float:
    """Seconds of a step: its arithmetic or its traffic, whichever takes longer. What is held is
    read once forwards and once backwards, activations are written and read."""
    peaks = gpus()[gpu]
    speed = peaks["float32" if precision == "float32" else "half"] * 1e12 * USED["compute"]
    traffic = (2 * held + 2 * part.kept) / (peaks["bandwidth"] * 1e9 * USED["bandwidth"])
    return max(part.operations / speed, traffic)


def measure_step_costs(planned: Plan, *, counted: bool = False) -> tuple[list[StepCost], float]:
    """What a run consists of, and the bytes its learner holds; operations only if counted."""
    s, stream = planned.settings, planned.scenario
    sessions = [stream.session(t) for t in range(len(stream.task_groups))]
    passes = sum(len(x.train) // min(s.batch_size, len(x.train)) for x in sessions)
    streamed = sum(-(-len(x.unlabelled) // s.stream_batch_size) for x in sessions)
    first = sessions[0]
    some = min(len(first.train), LOOK * s.batch_size)
    few = np.linspace(0, len(first.train) - 1, some).astype(np.int64)
    enough = -(-LOOK // (some // min(s.batch_size, some)))  # passes with so many steps in all
    learner = Learner(s.learner().model_copy(update={"epochs": enough}), planned.backbone)
    lessons = learner.training_steps(replace(first, train=first.train.subset(few)))
    lesson = _measure_steps(lambda: next(lessons, None), s.epochs * passes, learner, counted)
    for _ in lessons:  # the stream begins when the session has ended
        pass
    pixels = next(first.unlabelled.batches(s.stream_batch_size), read_pixels([], learner.preprocess))
    adapt = _measure_steps(lambda: learner.adapt(pixels), streamed, learner, counted)
    experts = learner.method.experts(learner.student)
    test = stream.tasks[0].test
    batch = test.read(np.arange(min(64, len(test))))
    asked = [
        sum(len(stream.tasks[j].test) for j in stream.seen_tasks(t))
        for t in range(len(stream.task_groups))
    ]
    looks = len(experts) * sum(asked) * (2 if learner.method.adapts else 1) / max(1, len(batch))
    expert = next(iter(experts.values()))
    exam = _measure_steps(lambda: learner.logits(batch, expert), looks, learner, counted)
    return [lesson, adapt, exam], _learner_bytes(learner)


def _measure_steps(
    step: Callable[[], object], steps: float, learner: Learner, counted: bool
) -> StepCost:
    taken = []
    for _ in range(LOOK - counted):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    seconds = float(np.median(taken[1:]))
    if not counted:
        return StepCost(steps, seconds)
    known, kept = set(map(_address, learner.student.backbone.weights().values())), {}

    def pack(tensor: Tensor) -> Tensor:
        if _address(tensor) not in known:
            kept[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    # Attention as plain products, or they would not be counted on a CPU.
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        step()
    return StepCost(steps, seconds, counter.get_total_flops(), sum(kept.values()))


def _learner_bytes(learner: Learner) -> float:
    """Bytes of weights, of what twins do not share, and of the optimizer and its gradients."""
    student = learner.student
    moments = student.optimizer_state().values()
    nets = [student.backbone, *learner.method.shared_copies().values()]
    weights = {_address(w): w for net in nets for w in net.weights().values()}
    return _bytes(weights.values()) + 1.5 * _bytes(moments)


def _bytes(tensors: Iterable[Tensor]) -> float:
    return sum(t.numel() * t.element_size() for t in tensors)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def time_sessions(
    rows: dict[str, RunSettings], folder: Path, measure: bool
) -> dict[str, Any] | None:
    """Seconds of every session, each method in turn before anybody goes on; kept in the folder."""
    plans = {name: plan(settings) for name, settings in rows.items()}
    place = folder / f"time-{hash_key({n: p.identity for n, p in plans.items()})}.json"
    if place.exists():
        found: dict[str, Any] = read_json(place)
        return found
    if not measure:
        return None
    learners = {n: Learner(p.settings.learner(), p.backbone) for n, p in plans.items()}
    taken: dict[str, list[float]] = {name: [] for name in rows}
    steps: dict[str, list[int]] = {name: [] for name in rows}
    for t in range(min(len(p.scenario.task_groups) for p in plans.values())):
        order = list(rows)
        for name in order if t % 2 == 0 else reversed(order):
            session, settings = plans[name].scenario.session(t), plans[name].settings
            start = time.perf_counter()
            steps[name].append(_run_session(learners[name], session, settings.stream_batch_size))
            taken[name].append(round(time.perf_counter() - start, 3))
    result = {
        "seconds": taken,
        "steps": steps,
        "keys": {name: p.key for name, p in plans.items()},
        "streams": {name: p.scenario.hash for name, p in plans.items()},
        "backbone": rows[order[0]].backbone,
        "tasks": [
            {"train": len(t.train), "test": len(t.test)} for t in plans[order[0]].scenario.tasks
        ],
        "backbones": {name: learners[name].fingerprint for name in plans},
        "machine": describe_machine(next(iter(learners.values())).device.type),
        "finished": timestamp(),
    }
    write_json(place, result)
    return result


def _run_session(learner: Learner, session: Session, size: int) -> int:
    """A session and its stream; says how many steps the stream had."""
    learner.learn(session)
    guesses = [learner.adapt(pixels) for pixels in session.unlabelled.batches(size)]
    return sum(guess is not None for guess in guesses)
