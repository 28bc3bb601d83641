"""The experiment: a stream, a learner, a matrix. The paper's Figure 1 as a loop.

    for each session:  learn with labels → measure → adapt on the stream → measure

A run lives in a folder. Its learner's history is its checkpoint: killed at any moment, it goes on
from the last one and ends with the same bytes.
"""

import datetime
import importlib.metadata
import json
import platform
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dosapp.errors import CorruptRecordError, InputError
from dosapp.experiments.evaluator import Evaluator
from dosapp.experiments.metrics import (
    DEFINITIONS,
    OF_R,
    Matrix,
    forgetting_matrix,
    forward_transfer,
    previous_tasks,
    sample_weighted_accuracy,
)
from dosapp.experiments.plan import Plan, plan, run_label
from dosapp.experiments.result import Result, cells
from dosapp.learner.learner import Learner
from dosapp.runtime import distributed
from dosapp.runtime.files import ensure_dir, lock_folder, read_json, write_json
from dosapp.runtime.process_memory import peak_memory, reset_peak_memory
from dosapp.settings import RunSettings

EVERY = 50  # steps between checkpoints: what a kill can cost


class RunCallback:
    """What a run tells while it goes on; the default listens to nothing."""

    def on_begin(self, label: str, sessions: int) -> None: ...

    def on_training_step(self, session: int, step: int, of: int, loss: float) -> None: ...

    def on_stream_step(self, session: int, step: int, of: int) -> None: ...

    def on_evaluation(self, session: int, row: list[float]) -> None: ...


@dataclass
class Progress:
    """Where a run stands and what it has measured; JSON in every checkpoint."""

    session: int = 0
    phase: str = "learn"
    done: int = 0  # steps of this phase
    matrices: dict[str, dict[str, list[list[float | None]]]] = field(default_factory=dict)
    ahead: list[float] = field(default_factory=list)
    zero_shot: list[float] = field(default_factory=list)
    untouched: float = 0.0
    control: float = 0.0  # of the untouched model, like the two before it
    right: list[int] = field(default_factory=list)  # pseudo-labels, per session
    guessed: list[int] = field(default_factory=list)
    differed: list[float] = field(default_factory=list)
    distance: dict[str, list[float]] = field(default_factory=lambda: {"lessons": [], "stream": []})
    steps: dict[str, list[int]] = field(default_factory=lambda: {"lessons": [], "stream": []})
    seconds: dict[str, list[float]] = field(
        default_factory=lambda: {"lessons": [], "stream": [], "measuring": []}
    )


def run(
    settings: RunSettings | Plan,
    folder: Path,
    *,
    resume: bool = False,
    wait: bool = False,
    watch: RunCallback | None = None,
) -> Result:
    """Run or finish a run in its folder; a finished one is read, not computed again. With `wait`,
    one that another process is computing is waited for."""
    planned = settings if isinstance(settings, Plan) else plan(settings)
    if _known(folder, planned.identity, resume) and (folder / "result.json").exists():
        return Result.read(folder)
    with lock_folder(ensure_dir(folder), wait):
        known = _known(folder, planned.identity, resume)  # whoever had the lock may have begun it
        if known and (folder / "result.json").exists():
            return Result.read(folder)
        reset_peak_memory()
        planned.scenario.check()
        learner = Learner(planned.settings.learner(), planned.backbone)
        threads = known["threads"] if known else torch.get_num_threads()
        if not known:
            how = {"threads": threads, "processes": distributed.world_size()}
            write_json(folder / "run.json", {"identity": planned.identity, **how})
        with lock_folder(ensure_dir(folder / "learner")), _threads(threads):
            return Experiment(planned, learner, folder, watch or RunCallback()).finish()


def _known(folder: Path, identity: Mapping[str, Any], resume: bool) -> dict[str, Any] | None:
    """What the folder says of the run in it, if it is this one; never take over another's."""
    path = folder / "run.json"
    if not path.exists():
        left = [p for p in folder.iterdir() if p.name[0] != "."] if folder.exists() else []
        if left and [p.name for p in left] != ["error.log"]:
            raise InputError(f"'{folder}' is not empty and holds no run; choose another --out")
        return None
    if not resume:
        raise InputError(f"'{folder}' already holds a run; add --resume to go on with it")
    found: dict[str, Any] = read_json(path)
    if found.get("identity") != json.loads(json.dumps(identity)):
        raise InputError(f"'{folder}' holds a run with other settings; choose another --out")
    begun = found.get("processes", 1)
    if begun != distributed.world_size() and not (folder / "result.json").exists():
        raise InputError(f"'{folder}' was begun by {begun} process(es) and goes on with as many")
    return found


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """The number of threads decides how sums are rounded, so a run keeps the one it began with."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Experiment:
    def __init__(self, planned: Plan, learner: Learner, folder: Path, watch: RunCallback) -> None:
        self.settings, self.stream, self.key = planned.settings, planned.scenario, planned.key
        self.learner, self.folder, self.watch = learner, folder, watch
        self.net = planned.backbone  # without what the method adds to it; the student trains it
        self.evaluator = Evaluator(planned.scenario, learner)
        self.history = learner.history(folder / "learner")
        self.progress = Progress()

    def finish(self) -> Result:
        sessions = len(self.stream.task_groups)
        if not self._resumed():
            self.learner.write_description(self.folder / "learner")
            self._before_all()
        progress = self.progress
        self.watch.on_begin(run_label(self.settings), sessions)
        while progress.session < sessions:
            if progress.phase == "learn":
                self._learn(progress.session)
            else:
                self._adapt(progress.session)
        result = self.result()
        result.write(self.folder)
        return result

    def _resumed(self) -> bool:
        """Go on from the checkpoint, if there is one. Versions alone do not say where a run was."""
        if not self.history.exists():
            return False
        try:
            state, working = self.history.resume()
        except CorruptRecordError as error:
            warnings.warn(f"{error}; the run begins again", stacklevel=2)
            self.history.reset()
            return False
        self.learner.restore(state, working)
        self.progress = Progress(**working.facts["progress"])
        return True

    def _learn(self, t: int) -> None:
        progress, session = self.progress, self.stream.session(t)
        if progress.done == 0:
            self._look_ahead(t)
        step = progress.done
        lessons = self.learner.training_steps(session, progress.done)
        while True:
            with self._timed("lessons", t):
                lesson = next(lessons, None)
            if lesson is None:
                break
            step = lesson.number
            self.watch.on_training_step(t, lesson.number, lesson.of, lesson.loss)
            if lesson.number % EVERY == 0:
                progress.done = lesson.number
                self._checkpoint()
        self._count("steps", "lessons", t, step)
        self._measure(t, "before")
        self._next(t, "adapt", f"session {t + 1}: learned")

    def _adapt(self, t: int) -> None:
        progress, session = self.progress, self.stream.session(t)
        size, stream = self.settings.stream_batch_size, session.unlabelled
        truth, batches = self.stream.stream_labels(t), -(-len(stream) // size)
        if not self.learner.method.adapts:
            batches = 0
        for counter in (progress.right, progress.guessed, progress.differed):
            counter.extend([0] * (t + 1 - len(counter)))
        left = range(progress.done, batches)
        for n, pixels in zip(left, stream.batches(size, progress.done), strict=False):
            with self._timed("stream", t):
                guess = self.learner.adapt(pixels)
            if guess is not None:
                right = guess.labels.cpu().numpy() == truth[n * size : n * size + len(pixels)]
                if guess.trusted is not None:  # of the others no label was learned from
                    right = right[guess.trusted.cpu().numpy()]
                progress.right[t] += int(right.sum())
                progress.guessed[t] += len(right)
                progress.differed[t] += guess.disagreement * len(right)
            self.watch.on_stream_step(t, n + 1, batches)
            if (n + 1) % EVERY == 0:
                progress.done = n + 1
                self._checkpoint()
        self._count("steps", "stream", t, batches)
        self._measure(t, "after", same=batches == 0)
        self._next(t, "learn", f"session {t + 1}: adapted")

    def _next(self, t: int, phase: str, reason: str) -> None:
        self.progress.session = t + (phase == "learn")
        self.progress.phase, self.progress.done = phase, 0
        row = next(iter(self.progress.matrices.values()))["before" if phase == "adapt" else "after"]
        self.history.commit(self.learner.state(), reason, {"accuracy": row[t]})
        self._checkpoint()

    def _checkpoint(self) -> None:
        working = self.learner.working_state()
        working.facts["progress"] = asdict(self.progress)
        self.history.checkpoint(self.learner.state(), working)

    # Measuring

    def _before_all(self) -> None:
        """Zero-shot accuracy on each task among the classes met by then, and on the control set."""
        net, every = self.net, range(len(self.stream.tasks))
        self.progress.zero_shot = [self.evaluator.accuracy(net, j, range(j + 1)) for j in every]
        self.progress.untouched = float(
            np.mean([self.evaluator.accuracy(net, j, every) for j in every])
        )
        self.progress.control = self.evaluator.control(net)

    def _look_ahead(self, t: int) -> None:
        """Accuracy on the next task before its lessons: what learning others did for it."""
        expert = self.evaluator.answering()
        for j in self.stream.task_groups[t]:
            ahead = self.evaluator.accuracy(expert, j, range(j + 1))
            self.progress.ahead = [*self.progress.ahead[:j], ahead]

    def _measure(self, t: int, when: str, same: bool = False) -> None:
        """Row t of the matrix of every expert; `same` copies what was measured before."""
        seen = self.stream.seen_tasks(t)
        with self._timed("measuring", t):
            for name, expert in self.evaluator.experts().items():
                both = self.progress.matrices.setdefault(name, {"before": [], "after": []})
                if same:
                    row = both["before"][t]
                else:
                    row = [None] * len(self.stream.tasks)
                    for j in seen:
                        row[j] = self.evaluator.accuracy(expert, j, seen)
                both[when] = [*both[when][:t], row]
        phase = {"before": "lessons", "after": "stream"}[when]
        distances = self.progress.distance[phase]
        self.progress.distance[phase] = [*distances[:t], self.evaluator.distance()]
        if when == "after":
            first = next(iter(self.progress.matrices.values()))
            self.watch.on_evaluation(t, [x for x in first["after"][t] if x is not None])

    @contextmanager
    def _timed(self, phase: str, t: int) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._count("seconds", phase, t, time.monotonic() - start, add=True)

    def _count(self, what: str, phase: str, t: int, value: float, add: bool = False) -> None:
        counts: list[Any] = getattr(self.progress, what)[phase]
        counts += [0] * (t + 1 - len(counts))
        counts[t] = counts[t] + value if add else value

    # Telling

    def result(self) -> Result:
        progress, stream = self.progress, self.stream
        expert = next(iter(progress.matrices))
        matrices = {
            name: {when: np.array(rows, dtype=float) for when, rows in both.items()}
            for name, both in progress.matrices.items()
        }
        R: Matrix = matrices[expert]["after"]
        sizes = np.array([len(task.test) for task in stream.tasks])
        metrics = {name: formula(R) for name, formula in OF_R.items()}
        metrics["sample_weighted_accuracy"] = sample_weighted_accuracy(R, sizes)
        ahead, zero = np.array(progress.ahead), np.array(progress.zero_shot)
        metrics["forward_transfer"] = forward_transfer(ahead, zero) if len(R) > 1 else np.nan
        metrics["zero_shot_accuracy"] = progress.untouched
        metrics["control_accuracy"] = self.evaluator.control()
        metrics["control_kept"] = metrics["control_accuracy"] - progress.control
        sessions = range(len(stream.task_groups))
        return Result(
            key=self.key,
            settings=self.settings.model_dump(mode="json"),
            label=run_label(self.settings),
            evaluated=expert,
            metrics={k: None if np.isnan(v) else v for k, v in metrics.items()},
            definitions=dict(DEFINITIONS),
            R=cells(R),
            matrices={
                name: {when: cells(rows) for when, rows in both.items()}
                for name, both in matrices.items()
            },
            forgetting_matrix=cells(forgetting_matrix(R)),
            previous_tasks={
                when: previous_tasks(matrices[expert][when]) for when in ("before", "after")
            },
            per_class=self.evaluator.per_class(),
            tasks=[
                {
                    "classes": list(task.classes),
                    "train": len(task.train),
                    "stream": len(task.unlabelled),
                    "test": len(task.test),
                }
                for task in stream.tasks
            ],
            stream={
                "name": stream.name,
                "hash": stream.hash,
                "images": [len(stream.session(t).unlabelled) for t in sessions],
                "boundaries": list(stream.boundaries),
                "left_out": stream.skipped,
            },
            pseudo_labels=_shares(progress.right, progress.guessed, 100),
            disagreement=_shares(progress.differed, progress.guessed, 100),
            distance=progress.distance,
            steps=progress.steps,
            seconds={k: [round(s, 3) for s in v] for k, v in progress.seconds.items()},
            peak_memory=peak_memory(),
            backbone={
                "name": self.settings.backbone,
                "fingerprint": self.learner.fingerprint,
            },
            weights=self.learner.digest(),
            libraries={
                name: importlib.metadata.version(name)
                for name in ("dosapp", "torch", "transformers", "numpy")
            },
            machine=machine(self.learner.device.type),
            finished=now(),
        )


def machine(device: str) -> str:
    said = f"{_processor()}, {torch.get_num_threads()} threads"
    if device == "cuda":
        said += f", {torch.cuda.get_device_name()}"
    elif device != "cpu":
        said += f", {device}"
    return (
        said if distributed.world_size() == 1 else f"{said}, {distributed.world_size()} processes"
    )


def _processor() -> str:
    """Linux has no other name for it than the first line of its own list."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _shares(parts: list[Any], wholes: list[int], times: float) -> list[float | None]:
    return [times * p / w if w else None for p, w in zip(parts, wholes, strict=True)]
