"""Run an experiment: train a learner on a scenario and fill the accuracy matrix (Figure 1).

    for each session:  learn with labels → evaluate → adapt on the stream → evaluate

A run has a folder. The history of its learner is its checkpoint: killed at any moment, it continues
from the last one and ends with the same bytes.
"""

import importlib.metadata
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dosapp.errors import CorruptRecordError
from dosapp.experiments.callbacks import Phase, RunCallback
from dosapp.experiments.evaluator import Evaluator
from dosapp.experiments.identity import run_label
from dosapp.experiments.metrics import (
    DEFINITIONS,
    MATRIX_METRICS,
    Matrix,
    accuracy,
    forgetting,
    forgetting_matrix,
    forward_transfer,
    previous_tasks,
    sample_weighted_accuracy,
)
from dosapp.experiments.plan import Plan, plan
from dosapp.experiments.result import Result, matrix_cells
from dosapp.experiments.run_folder import check_same_run
from dosapp.history.record import State
from dosapp.learner.learner import Learner
from dosapp.learner.learner_folder import write_description
from dosapp.learner.training_defaults import choose_batch_size
from dosapp.methods.base import AdaptResult
from dosapp.runtime import distributed
from dosapp.runtime.devices import resolve_device
from dosapp.runtime.files import ensure_dir, lock_folder, write_json
from dosapp.runtime.machine import describe_machine, timestamp
from dosapp.runtime.process_memory import peak_memory, reset_peak_memory
from dosapp.settings import RunSettings

CHECKPOINT_INTERVAL = 50  # steps


@dataclass
class Progress:
    """Position of a run and what it has measured: JSON in every checkpoint (field names are the
    format's)."""

    session: int = 0
    phase: Phase = "learn"
    done: int = 0  # steps of this phase
    matrices: dict[str, dict[str, list[list[float | None]]]] = field(default_factory=dict)
    ahead: list[float] = field(default_factory=list)  # accuracy on a task before it is learned
    zero_shot: list[float] = field(default_factory=list)  # of the pretrained model, likewise
    untouched: float = 0.0  # accuracy of the pretrained model over all classes
    control: float = 0.0  # its accuracy on the control set
    right: list[int] = field(default_factory=list)  # correct pseudo-labels, per session
    guessed: list[int] = field(default_factory=list)  # pseudo-labels, per session
    differed: list[float] = field(default_factory=list)  # images on which the experts disagree
    # "lessons" is the labelled phase: names in results do not change.
    distance: dict[str, list[float]] = field(default_factory=lambda: {"lessons": [], "stream": []})
    steps: dict[str, list[int]] = field(default_factory=lambda: {"lessons": [], "stream": []})
    seconds: dict[str, list[float]] = field(
        default_factory=lambda: {"lessons": [], "stream": [], "measuring": []}
    )


def run(
    settings: RunSettings | Plan,
    folder: Path | str,
    *,
    resume: bool = False,
    wait: bool = False,
    callback: RunCallback | None = None,
    data: Any = None,
) -> Result:
    """Run an experiment, or continue it; a finished one is read.

    Args:
        settings: The run, or its plan.
        folder: Where its checkpoints and its result go.
        resume: Continue the run in the folder if there is one.
        wait: Wait for another process that is computing the same run.
        callback: Called with the progress.
        data: Labelled images instead of those that the settings name: a path, a torch `Dataset`,
            arrays, a table; see `as_dataset`.

    Returns:
        The result, which is also in `folder/result.json`.

    Raises:
        InputError: The folder holds something else, or the settings cannot be run.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> small = RunSettings(classes=4, tasks=2, train_images=4, test_images=4, epochs=1)
        >>> len(run(small, Path(tempfile.mkdtemp()) / "run").R)
        2
    """
    folder = Path(folder)
    planned = settings if isinstance(settings, Plan) else plan(settings, data)
    known = check_same_run(folder, planned.identity, resume)
    if known and (folder / "result.json").exists():
        return Result.read(folder)
    resolve_device(planned.settings.device)  # before the folder exists
    with lock_folder(ensure_dir(folder), wait):
        # Another process may have started or finished it meanwhile.
        known = check_same_run(folder, planned.identity, resume)
        if known and (folder / "result.json").exists():
            return Result.read(folder)
        reset_peak_memory()
        planned.scenario.check()
        learner = Learner(planned.settings.learner(), planned.backbone)
        threads = known["threads"] if known else torch.get_num_threads()
        if not known:
            processes = distributed.world_size()
            facts = {"identity": planned.identity, "threads": threads, "processes": processes}
            write_json(folder / "run.json", facts)
        with lock_folder(ensure_dir(folder / "learner")) as lock, _use_threads(threads):
            experiment = Experiment(planned, learner, folder, callback or RunCallback())
            experiment.history.begin_writing(lock)
            return experiment.finish()


@contextmanager
def _use_threads(count: int) -> Iterator[None]:
    """Use this number of threads: it decides how sums are rounded, so a run keeps its first one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Experiment:
    """One run in progress."""

    def __init__(
        self, planned: Plan, learner: Learner, folder: Path, callback: RunCallback
    ) -> None:
        self.planned, self.settings = planned, planned.settings
        self.scenario, self.learner = planned.scenario, learner
        self.folder, self.callback = folder, callback
        self.evaluator = Evaluator(planned.scenario, learner)
        self.history = learner.history(folder / "learner")
        self.progress = Progress()

    def finish(self) -> Result:
        """Run all sessions that are left, and write the result."""
        is_resumed = self._resume()
        if not is_resumed:
            write_description(self.learner, self.folder / "learner")
            self._evaluate_pretrained()
        progress, sessions = self.progress, len(self.scenario.task_groups)
        self.callback.on_begin(run_label(self.settings), sessions)
        if is_resumed:
            self.callback.on_resume(progress.session, progress.phase, progress.done)
        while progress.session < sessions:
            if progress.phase == "learn":
                self._learn(progress.session)
            else:
                self._adapt(progress.session)
        result = self._result()
        result.write(self.folder)
        return result

    def _resume(self) -> bool:
        """Continue from the checkpoint; versions alone do not say where a run was."""
        if not self.history.exists():
            return False
        try:
            state, working = self.history.resume()
        except CorruptRecordError as error:
            warnings.warn(f"{error}; the run starts again", stacklevel=2)
            self.history.reset()
            return False
        self.learner.restore(state, working)
        self.progress = Progress(**working.facts["progress"])
        return True

    # Phases

    def _learn(self, t: int) -> None:
        progress, session = self.progress, self.scenario.session(t)
        if progress.done == 0:
            self._evaluate_before_learning(t)
        done = progress.done
        steps = self.learner.training_steps(session, progress.done)
        while True:
            with self._timed("lessons", t):
                step = next(steps, None)
            if step is None:
                break
            done = step.number
            self.callback.on_training_step(t, step.number, step.total, step.loss)
            if step.number % CHECKPOINT_INTERVAL == 0:
                progress.done = step.number
                self._checkpoint()
        self._record("steps", "lessons", t, done)
        self._evaluate(t, "before")
        self._end_phase(t, "adapt", f"session {t + 1}: learned")

    def _adapt(self, t: int) -> None:
        progress, stream = self.progress, self.scenario.session(t).unlabelled
        size = self.settings.stream_batch_size or choose_batch_size(len(stream))
        labels = self.scenario.stream_labels(t)
        batches = -(-len(stream) // size) if self.learner.adapts else 0
        for counter in (progress.right, progress.guessed, progress.differed):
            counter.extend([0] * (t + 1 - len(counter)))
        left = range(progress.done, batches)
        for n, pixels in zip(left, stream.batches(size, progress.done), strict=False):
            with self._timed("stream", t):
                result = self.learner.adapt(pixels)
            if result is not None:
                self._count_pseudo_labels(t, result, labels[n * size : n * size + len(pixels)])
            self.callback.on_stream_step(t, n + 1, batches)
            if (n + 1) % CHECKPOINT_INTERVAL == 0:
                progress.done = n + 1
                self._checkpoint()
        self._record("steps", "stream", t, batches)
        self._evaluate(t, "after", unchanged=batches == 0)
        self._end_phase(t, "learn", f"session {t + 1}: adapted")

    def _count_pseudo_labels(self, t: int, result: AdaptResult, labels: np.ndarray) -> None:
        correct = result.labels.cpu().numpy() == labels
        if result.trusted is not None:  # gated images are not learned from
            correct = correct[result.trusted.cpu().numpy()]
        self.progress.right[t] += int(correct.sum())
        self.progress.guessed[t] += len(correct)
        self.progress.differed[t] += result.disagreement * len(correct)

    def _end_phase(self, t: int, next_phase: Phase, reason: str) -> None:
        self.progress.session = t + (next_phase == "learn")
        self.progress.phase, self.progress.done = next_phase, 0
        when = "before" if next_phase == "adapt" else "after"
        accuracies = next(iter(self.progress.matrices.values()))[when][t]
        measured = {"accuracy": accuracies}
        self.history.append(self.learner.state(), self._working_state(), reason, measured)

    def _checkpoint(self) -> None:
        self.history.checkpoint(self.learner.state(), self._working_state())

    def _working_state(self) -> State:
        working = self.learner.working_state()
        working.facts["progress"] = asdict(self.progress)
        return working

    # Evaluation

    def _evaluate_pretrained(self) -> None:
        """Zero-shot accuracy on each task among the classes seen so far, and on controls."""
        backbone, tasks = self.planned.backbone, range(len(self.scenario.tasks))
        measure = self.evaluator.accuracy
        self.progress.zero_shot = [measure(backbone, j, range(j + 1)) for j in tasks]
        overall = [measure(backbone, j, tasks) for j in tasks]
        self.progress.untouched = float(np.mean(overall))
        self.progress.control = self.evaluator.control_accuracy(backbone)

    def _evaluate_before_learning(self, t: int) -> None:
        """Accuracy on the next task before it is learned, for forward transfer."""
        _, expert = self.learner.answering_expert
        for j in self.scenario.task_groups[t]:
            ahead = self.evaluator.accuracy(expert, j, range(j + 1))
            self.progress.ahead = [*self.progress.ahead[:j], ahead]

    def _evaluate(self, t: int, when: str, unchanged: bool = False) -> None:
        """Row t of the accuracy matrix of every expert; if unchanged, copied from before."""
        seen = self.scenario.seen_tasks(t)
        with self._timed("measuring", t):
            for name, expert in self.evaluator.experts().items():
                both = self.progress.matrices.setdefault(name, {"before": [], "after": []})
                row = both["before"][t] if unchanged else self.evaluator.matrix_row(expert, seen)
                both[when] = [*both[when][:t], row]
        phase = {"before": "lessons", "after": "stream"}[when]
        distances = self.progress.distance[phase]
        self.progress.distance[phase] = [*distances[:t], self.evaluator.expert_distance()]
        if when == "after":
            answering = next(iter(self.progress.matrices.values()))
            self.callback.on_evaluation(t, [x for x in answering["after"][t] if x is not None])
            self.callback.on_metrics(t, self._metrics_so_far(answering, seen))

    def _metrics_so_far(
        self, matrices: Mapping[str, list[list[float | None]]], seen: Sequence[int]
    ) -> dict[str, float]:
        """Metrics of the tasks seen by now: R as if the run ended here."""
        R = np.array(matrices["after"], dtype=float)[:, list(seen)]
        before = np.array(matrices["before"][-1], dtype=float)[list(seen)]
        values = {
            "accuracy": accuracy(R),
            "accuracy_before_stream": float(np.mean(before)),
            "forgetting": forgetting(R),
            **{f"task_accuracy/{j + 1:02d}": float(R[-1, n]) for n, j in enumerate(seen)},
        }
        return {name: value for name, value in values.items() if not np.isnan(value)}

    @contextmanager
    def _timed(self, phase: str, t: int) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._record("seconds", phase, t, time.monotonic() - start, add=True)

    def _record(self, name: str, phase: str, t: int, value: float, add: bool = False) -> None:
        """Set or add to a value of a session."""
        values: list[Any] = getattr(self.progress, name)[phase]
        values += [0] * (t + 1 - len(values))
        values[t] = values[t] + value if add else value

    # Result

    def _result(self) -> Result:
        progress, scenario = self.progress, self.scenario
        answering = next(iter(progress.matrices))
        matrices = {
            name: {when: np.array(rows, dtype=float) for when, rows in both.items()}
            for name, both in progress.matrices.items()
        }
        R = matrices[answering]["after"]
        before_after = {when: matrices[answering][when] for when in ("before", "after")}
        sessions = range(len(scenario.task_groups))
        per_class, calibration_error = self.evaluator.evaluate_classes()
        metrics = {**self._metrics(R), "calibration_error": calibration_error}
        return Result(
            key=self.planned.key,
            settings=self.settings.model_dump(mode="json"),
            training=self.learner.training.to_dict(len(scenario.session(0).train)),
            hyperparameters=self.planned.method.hyperparameters(),
            label=run_label(self.settings),
            evaluated=answering,
            metrics={k: None if np.isnan(v) else v for k, v in metrics.items()},
            definitions=dict(DEFINITIONS),
            R=matrix_cells(R),
            matrices={
                name: {when: matrix_cells(rows) for when, rows in both.items()}
                for name, both in matrices.items()
            },
            forgetting_matrix=matrix_cells(forgetting_matrix(R)),
            previous_tasks={when: previous_tasks(M) for when, M in before_after.items()},
            per_class=per_class,
            tasks=[
                {
                    "classes": list(task.classes),
                    "train": len(task.train),
                    "stream": len(task.unlabelled),
                    "test": len(task.test),
                }
                for task in scenario.tasks
            ],
            stream={
                "name": scenario.name,
                "hash": scenario.hash,
                "images": [len(scenario.session(t).unlabelled) for t in sessions],
                "boundaries": list(scenario.boundaries),
                "left_out": scenario.skipped,
            },
            pseudo_labels=_percentages(progress.right, progress.guessed),
            disagreement=_percentages(progress.differed, progress.guessed),
            distance=progress.distance,
            steps=progress.steps,
            seconds={k: [round(s, 3) for s in v] for k, v in progress.seconds.items()},
            peak_memory=peak_memory(),
            backbone={"name": self.settings.backbone, "fingerprint": self.learner.fingerprint},
            weights=self.learner.digest(),
            libraries={
                name: importlib.metadata.version(name)
                for name in ("dosapp", "torch", "transformers", "numpy")
            },
            machine=describe_machine(self.learner.device.type),
            finished=timestamp(),
        )

    def _metrics(self, R: Matrix) -> dict[str, float]:
        progress, sizes = self.progress, [len(task.test) for task in self.scenario.tasks]
        metrics = {name: formula(R) for name, formula in MATRIX_METRICS.items()}
        metrics["sample_weighted_accuracy"] = sample_weighted_accuracy(R, np.array(sizes))
        ahead, zero_shot = np.array(progress.ahead), np.array(progress.zero_shot)
        metrics["forward_transfer"] = forward_transfer(ahead, zero_shot) if len(R) > 1 else np.nan
        metrics["zero_shot_accuracy"] = progress.untouched
        metrics["control_accuracy"] = self.evaluator.control_accuracy()
        metrics["control_kept"] = metrics["control_accuracy"] - progress.control
        return metrics


def _percentages(parts: list[Any], totals: list[int]) -> list[float | None]:
    return [100 * part / n if n else None for part, n in zip(parts, totals, strict=True)]
