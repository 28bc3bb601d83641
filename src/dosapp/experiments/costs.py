"""Costs of runs: estimates from a few steps, and methods timed in alternating sessions.

An estimate for this machine is the time of a few steps of each kind of run, times their number. For
another GPU it is the floating-point operations and the memory traffic of these steps, divided by a
share of the GPU's peak. Timed sessions of several methods alternate in one process, since the
machine may be shared; only their ratios are meaningful.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from dosapp.learner.learner import Learner
from dosapp.learner.training_defaults import Training, choose_batch_size
from dosapp.runtime.files import read_json, write_json
from dosapp.runtime.machine import describe_machine, timestamp
from dosapp.runtime.process_memory import peak_memory, reset_peak_memory
from dosapp.scenario import Session
from dosapp.settings import PAPER_LR, RunSettings, hash_key

# Settings that hardly change the cost of a run; it is measured once for all their values.
COST_FREE = {"seed", "stream_noise", "test_noise", "correlated", "one_class"}
MEASURED_STEPS = 4  # of each phase; the first one warms up and is not counted
GPUS = Path(__file__).parent / "gpus.yaml"
UTILIZATION = {"compute": 0.4, "bandwidth": 0.7}  # assumed shares of a GPU's peak
GPU_CONTEXT = 600e6  # bytes that a process holds on a GPU before the first tensor


@dataclass(frozen=True)
class Estimate:
    """Expected cost of some runs."""

    runs: int
    seconds: float  # of all runs in sequence
    memory: float | None  # MB, of the largest run


@dataclass(frozen=True)
class StepCost:
    """Cost of the steps of one kind in a run: labelled, stream, or evaluation batches."""

    steps: float
    seconds: float  # of one step, on this machine
    operations: float = 0.0  # floating-point, of one step
    activations: float = 0.0  # bytes that one step keeps for its backward pass


def estimate(planned: Sequence[RunSettings], gpu: str | None = None) -> Estimate:
    """Estimate the cost of runs from a few steps of each kind.

    Args:
        planned: The runs.
        gpu: A name of `gpus.yaml`; None measures this machine.

    Returns:
        The sum of the times, and the memory of the largest run.

    Raises:
        InputError: The GPU is unknown, or data or a backbone is not available.
    """
    if gpu is not None and gpu not in load_gpus():
        raise unknown_name("GPU", gpu, load_gpus())
    kinds: dict[str, list[RunSettings]] = {}
    for settings in planned:
        kinds.setdefault(settings.model_dump_json(exclude=COST_FREE), []).append(settings)
    total, largest = 0.0, 0.0
    for runs in kinds.values():
        reset_peak_memory()
        costs, held = measure_step_costs(plan(runs[0]), count_operations=gpu is not None)
        if gpu is None:
            seconds, memory = sum(c.steps * c.seconds for c in costs), peak_memory() or 0.0
        else:
            precision = runs[0].precision
            seconds = sum(c.steps * estimate_gpu_seconds(gpu, c, held, precision) for c in costs)
            memory = (GPU_CONTEXT + held + max(c.activations for c in costs)) / 1e6
        total, largest = total + len(runs) * seconds, max(largest, memory)
    return Estimate(len(planned), total, largest or None)


def load_gpus() -> dict[str, dict[str, float]]:
    """Peak TFLOP/s, bandwidth (GB/s) and memory (GB) of known GPUs, by name."""
    gpus: dict[str, dict[str, float]] = yaml.safe_load(GPUS.read_text())
    return gpus


def estimate_gpu_seconds(gpu: str, cost: StepCost, held: float, precision: str) -> float:
    """Seconds of a step on a GPU: its arithmetic or its memory traffic, whichever takes longer.

    Args:
        gpu: A name of `gpus.yaml`.
        cost: The step.
        held: Bytes of weights and optimizer, which are read forwards and backwards.
        precision: Of the matrix products.
    """
    peaks = load_gpus()[gpu]
    speed = peaks["float32" if precision == "float32" else "half"] * 1e12 * UTILIZATION["compute"]
    traffic = 2 * held + 2 * cost.activations  # activations are written and read
    bandwidth = peaks["bandwidth"] * 1e9 * UTILIZATION["bandwidth"]
    return max(cost.operations / speed, traffic / bandwidth)


def measure_step_costs(
    planned: Plan, *, count_operations: bool = False
) -> tuple[list[StepCost], float]:
    """Measure a few steps of each kind of a run.

    Args:
        planned: The run.
        count_operations: Also count floating-point operations and activations.

    Returns:
        The costs of labelled steps, stream steps and evaluation batches, and the bytes that the
        learner holds.
    """
    s, scenario = planned.settings, planned.scenario
    sessions = [scenario.session(t) for t in range(len(scenario.task_groups))]
    training = Training(s.lr, s.epochs, s.batch_size)
    sizes = [len(session.train) for session in sessions]
    labelled_steps = sum(training.epochs_for(n) * (n // training.batch_size_for(n)) for n in sizes)
    streams = [len(session.unlabelled) for session in sessions]
    stream_steps = sum(-(-n // (s.stream_batch_size or choose_batch_size(n))) for n in streams)
    first = sessions[0]
    batch_size = training.batch_size_for(len(first.train))
    images = min(len(first.train), MEASURED_STEPS * batch_size)
    rows = np.linspace(0, len(first.train) - 1, images).astype(np.int64)
    epochs = -(-MEASURED_STEPS // (images // min(batch_size, images)))
    # The time does not depend on the rate, so a missing one need not be chosen.
    values = {"lr": s.lr or PAPER_LR, "epochs": epochs, "batch_size": batch_size}
    learner = Learner(s.learner().model_copy(update=values), planned.backbone)
    steps = learner.training_steps(replace(first, train=first.train.subset(rows)))
    measure = partial(_measure_steps, learner=learner, count_operations=count_operations)
    labelled = measure(lambda: next(steps, None), labelled_steps)
    for _ in steps:  # the stream starts after the session
        pass
    stream_size = s.stream_batch_size or choose_batch_size(max(streams))
    pixels: Any = next(first.unlabelled.batches(stream_size), [])
    stream = measure(lambda: learner.adapt(pixels), stream_steps)
    test = scenario.tasks[0].test
    batch = test.read(np.arange(min(64, len(test))))
    evaluated = sum(
        len(scenario.tasks[j].test)
        for t in range(len(scenario.task_groups))
        for j in scenario.seen_tasks(t)
    )
    experts = learner.experts()
    times = len(experts) * (2 if learner.adapts else 1)  # before and after the stream
    _, expert = learner.answering_expert
    evaluation = measure(
        lambda: learner.score_images(batch, expert), times * evaluated / max(1, len(batch))
    )
    return [labelled, stream, evaluation], _learner_bytes(learner)


def _measure_steps(
    step: Callable[[], object], steps: float, *, learner: Learner, count_operations: bool
) -> StepCost:
    times = []
    for _ in range(MEASURED_STEPS - count_operations):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    seconds = float(np.median(times[1:]))
    if not count_operations:
        return StepCost(steps, seconds)
    weights, activations = set(map(_address, learner.student.backbone.weights().values())), {}

    def pack(tensor: Tensor) -> Tensor:
        if _address(tensor) not in weights:
            activations[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    # Fused attention is not counted on a CPU.
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        step()
    return StepCost(steps, seconds, counter.get_total_flops(), sum(activations.values()))


def _learner_bytes(learner: Learner) -> float:
    """Bytes of weights, of shared copies as far as they differ, of optimizer and gradients."""
    student = learner.student
    moments = student.optimizer_state().values()
    backbones = [student.backbone, *learner.method.shared_copies().values()]
    weights = {_address(w): w for backbone in backbones for w in backbone.weights().values()}
    return _bytes(weights.values()) + 1.5 * _bytes(moments)


def _bytes(tensors: Iterable[Tensor]) -> float:
    return sum(t.numel() * t.element_size() for t in tensors)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def time_sessions(
    rows: dict[str, RunSettings], folder: Path, measure: bool
) -> dict[str, Any] | None:
    """Time the sessions of several methods, which alternate session by session.

    Args:
        rows: A run for each method, by the name of its row.
        folder: Where the times are stored, under a hash of the runs.
        measure: Whether to measure if they are not stored.

    Returns:
        Seconds, stream steps and provenance of each row; None if they are neither stored nor
        measured.
    """
    plans = {name: plan(settings) for name, settings in rows.items()}
    path = folder / f"time-{hash_key({n: p.identity for n, p in plans.items()})}.json"
    if path.exists():
        stored: dict[str, Any] = read_json(path)
        return stored
    if not measure:
        return None
    learners = {n: Learner(p.settings.learner(), p.backbone) for n, p in plans.items()}
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    steps: dict[str, list[int]] = {name: [] for name in rows}
    for t in range(min(len(p.scenario.task_groups) for p in plans.values())):
        order = list(rows)
        for name in order if t % 2 == 0 else reversed(order):
            session, settings = plans[name].scenario.session(t), plans[name].settings
            start = time.perf_counter()
            steps[name].append(_run_session(learners[name], session, settings.stream_batch_size))
            seconds[name].append(round(time.perf_counter() - start, 3))
    result = {
        "seconds": seconds,
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
    write_json(path, result)
    return result


def _run_session(learner: Learner, session: Session, size: int | None) -> int:
    """Train on a session and adapt to its stream; return the number of stream steps."""
    learner.learn(session)
    return len(learner.adapt_stream(session.unlabelled, batch_size=size))
