"""The experiment: a stream, a learner, a matrix. The paper's Figure 1 as a loop.

    for each session:  learn with labels → measure → adapt on the stream → measure

A run lives in a folder. Its learner's history is its checkpoint: killed at any moment, it goes on
from the last one and ends with the same bytes.
"""

import datetime
import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from dosapp.backbones.base import Backbone
from dosapp.backbones.clip import load as load_backbone
from dosapp.data import load_dataset
from dosapp.data.base import Dataset, Prompts
from dosapp.errors import BadInput
from dosapp.learner import Learner
from dosapp.methods import build
from dosapp.methods.base import Method
from dosapp.metrics import (
    DEFINITIONS,
    OF_R,
    Matrix,
    forgetting_matrix,
    forward_transfer,
    previous_tasks,
    sample_weighted_accuracy,
)
from dosapp.result import Result, cells
from dosapp.settings import RunSettings, key_of, read_yaml
from dosapp.storage import locked, read_json, write_json
from dosapp.streams import Labelled, Stream, concat, split

EVERY = 50  # steps between checkpoints: what a kill can cost
LOOK = 256  # images per evaluation batch
MEANING = 1  # raised when the same settings would give another result


class Watch:
    """Somebody who looks on. The default looks away."""

    def begin(self, label: str, sessions: int) -> None: ...

    def lesson(self, session: int, step: int, of: int, loss: float) -> None: ...

    def stream(self, session: int, step: int, of: int) -> None: ...

    def measured(self, session: int, row: list[float]) -> None: ...


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
    control: list[float] = field(default_factory=list)
    right: list[int] = field(default_factory=list)  # pseudo-labels, per session
    guessed: list[int] = field(default_factory=list)
    differed: list[float] = field(default_factory=list)
    distance: dict[str, list[float]] = field(default_factory=lambda: {"lessons": [], "stream": []})
    steps: dict[str, list[int]] = field(default_factory=lambda: {"lessons": [], "stream": []})
    seconds: dict[str, list[float]] = field(
        default_factory=lambda: {"lessons": [], "stream": [], "measuring": []}
    )


# What is run


def open_stream(settings: RunSettings, net: Backbone) -> Stream:
    """The stream a run's settings describe."""
    s = settings
    order, groups = _order(s.class_order)
    parts = []
    for name in s.data.split("+"):
        dataset = load_dataset(name, net, train=s.train_images, test=s.test_images)
        if s.classes is not None:
            if s.classes > len(dataset.classes):
                raise BadInput(
                    f"{s.classes} classes asked of {name}, which has {len(dataset.classes)}"
                )
            dataset = first_classes(dataset, s.classes)
        parts.append(split(dataset, groups or s.tasks, seed=s.seed, order=order))
    stream = concat(*parts) if len(parts) > 1 else parts[0]
    if s.stream_noise or s.test_noise:
        stream = stream.noisy(stream=s.stream_noise, test=s.test_noise)
    if s.fraction < 1:
        stream = stream.fraction(s.fraction)
    if s.imbalanced:
        stream = stream.imbalanced()
    if s.correlated:
        stream = stream.correlated()
    if s.chunks:
        stream = stream.chunks()
    if s.full_test:
        stream = stream.full_test()
    return stream if s.stream else stream.without_unlabelled()


def first_classes(dataset: Dataset, count: int) -> Dataset:
    return Dataset(
        dataset.name,
        dataset.classes[:count],
        dataset.train,
        dataset.test,
        dataset.prompts,
        dataset.control,
    )


def _order(path: Path | None) -> tuple[list[str] | None, list[list[str]] | None]:
    """A class-order file: names in order (lines, or a YAML list), or a YAML list of lists."""
    if path is None:
        return None, None
    try:
        text = path.read_text()
        found = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInput(f"class order '{path}' cannot be read ({error})") from error
    if isinstance(found, list) and all(isinstance(group, list) for group in found):
        return None, [[str(name) for name in group] for group in found]
    lines = [str(name) for name in found] if isinstance(found, list) else text.splitlines()
    return [line.strip() for line in lines if line.strip()], None


def label(settings: RunSettings) -> str:
    """How a table calls a run."""
    names = {"self-training": "D^u", "dosapp": "DoSAPP", "zero-shot": "zero-shot"}

    def said(name: str) -> str:
        return names.get(name, name.upper() if len(name) < 5 else name.capitalize())

    text = said(settings.method)
    if settings.adapt:
        text += f" + {said(settings.adapt)}"
    if settings.method == "dosapp" and not settings.stream:
        text += " without TTL"
    if settings.options:
        text += " (" + ", ".join(f"{k}={v}" for k, v in settings.options.items()) + ")"
    return text + (f" + ER={settings.memory}" if settings.memory else "")


@dataclass(frozen=True)
class Plan:
    """A run before its first step: what it will see, and the key its result belongs under."""

    settings: RunSettings
    net: Backbone
    method: Method
    stream: Stream
    identity: dict[str, Any]

    @property
    def key(self) -> str:
        return key_of(self.identity)


def plan(settings: RunSettings) -> Plan:
    settings = settings.resolved()
    net = load_backbone(settings.backbone)
    method = build(settings.method, settings.adapt, settings.options)
    stream = open_stream(settings, net)
    if method.joint:
        stream = stream.joint()
    return Plan(settings, net, method, stream, identity(settings, net, method, stream))


def identity(
    settings: RunSettings, net: Backbone, method: Method, stream: Stream
) -> dict[str, Any]:
    """Everything that determines a result, and nothing that does not.

    The stream's hash stands for all that shapes it, the fingerprint for the backbone, the method
    for its options and defaults. A new setting enters here only where it is not neutral.
    """
    s = settings
    return {
        "meaning": MEANING,
        "method": s.method,
        "adapt": s.adapt,
        "options": method.settings(),
        "learning": [s.rate, s.weight_decay, s.epochs, s.batch, s.stream_batch, s.memory, s.seed],
        "stream": stream.hash,
        "backbone": net.fingerprint(),
    }


# Running


def run(
    settings: RunSettings | Plan,
    folder: Path,
    *,
    resume: bool = False,
    watch: Watch | None = None,
) -> Result:
    """Run or finish a run in its folder; a finished one is read, not computed again."""
    planned = settings if isinstance(settings, Plan) else plan(settings)
    known = _known(folder, planned.identity, resume)
    if known and (folder / "result.json").exists():
        return Result.read(folder)
    planned.stream.check()
    learner = Learner(planned.settings.learner(), planned.net)
    threads = known["threads"] if known else torch.get_num_threads()
    if not known:
        write_json(folder / "run.json", {"identity": planned.identity, "threads": threads})
    with locked(folder), _threads(threads):
        return Experiment(planned, learner, folder, watch or Watch()).finish()


def _known(folder: Path, identity: Mapping[str, Any], resume: bool) -> dict[str, Any] | None:
    """What the folder says of the run in it, if it is this one; never take over another's."""
    path = folder / "run.json"
    if not path.exists():
        left = [p for p in folder.iterdir() if p.name[0] != "."] if folder.exists() else []
        if left and [p.name for p in left] != ["error.log"]:
            raise BadInput(f"'{folder}' is not empty and holds no run; choose another --out")
        return None
    if not resume:
        raise BadInput(f"'{folder}' already holds a run; add --resume to go on with it")
    found: dict[str, Any] = read_json(path)
    if found.get("identity") != json.loads(json.dumps(identity)):
        raise BadInput(f"'{folder}' holds a run with other settings; choose another --out")
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
    def __init__(self, planned: Plan, learner: Learner, folder: Path, watch: Watch) -> None:
        self.settings, self.stream, self.key = planned.settings, planned.stream, planned.key
        self.learner, self.folder, self.watch = learner, folder, watch
        self.history = learner.history(folder / "learner")
        self.progress = Progress()

    def finish(self) -> Result:
        progress, sessions = self.progress, len(self.stream.groups)
        if self.history.exists():
            state, working = self.history.resume()
            self.learner.restore(state, working)
            progress = self.progress = Progress(**working.facts["progress"])
        else:
            self.learner.describe(self.folder / "learner")
            self._before_all()
        self.watch.begin(label(self.settings), sessions)
        while progress.session < sessions:
            if progress.phase == "learn":
                self._learn(progress.session)
            else:
                self._adapt(progress.session)
        result = self.result()
        result.write(self.folder)
        return result

    def _learn(self, t: int) -> None:
        progress, session = self.progress, self.stream.session(t)
        if progress.done == 0:
            self._look_ahead(t)
        step = progress.done
        lessons = self.learner.lessons(session, progress.done)
        while True:
            with self._timed("lessons", t):
                lesson = next(lessons, None)
            if lesson is None:
                break
            step = lesson.step
            self.watch.lesson(t, lesson.step, lesson.of, lesson.loss)
            if lesson.step % EVERY == 0:
                progress.done = lesson.step
                self._checkpoint()
        self._count("steps", "lessons", t, step)
        self._measure(t, "before")
        self._next(t, "adapt", f"session {t + 1}: learned")

    def _adapt(self, t: int) -> None:
        progress, session = self.progress, self.stream.session(t)
        size, stream = self.settings.stream_batch, session.unlabelled
        truth, batches = self.stream.truth(t), -(-len(stream) // size)
        if not self.learner.method.adapts:
            batches = 0
        for counter in (progress.right, progress.guessed, progress.differed):
            counter.extend([0] * (t + 1 - len(counter)))
        for n in range(progress.done, batches):
            pixels = next(stream.batches(size, n))
            with self._timed("stream", t):
                guess = self.learner.adapt(pixels)
            if guess is not None:
                answer = truth[n * size : n * size + len(pixels)]
                progress.right[t] += int((guess.labels.numpy() == answer).sum())
                progress.guessed[t] += len(pixels)
                progress.differed[t] += guess.disagreement * len(pixels)
            self.watch.stream(t, n + 1, batches)
            if (n + 1) % EVERY == 0:
                progress.done = n + 1
                self._checkpoint()
        self._count("steps", "stream", t, batches)
        self._measure(t, "after", same=batches == 0)
        self._next(t, "learn", f"session {t + 1}: adapted")

    def _next(self, t: int, phase: str, reason: str) -> None:
        self.progress.session = t + (phase == "learn")
        self.progress.phase, self.progress.done = phase, 0
        self.history.commit(self.learner.state(), reason)
        self._checkpoint()

    def _checkpoint(self) -> None:
        working = self.learner.working()
        working.facts["progress"] = asdict(self.progress)
        self.history.checkpoint(self.learner.state(), working)

    # Measuring

    def _before_all(self) -> None:
        """Zero-shot accuracy on each task among the classes met by then, and on the control set."""
        net = self.learner.student.net
        every = range(len(self.stream.tasks))
        self.progress.zero_shot = [self._accuracy(net, j, range(j + 1)) for j in every]
        self.progress.untouched = float(np.mean([self._accuracy(net, j, every) for j in every]))
        self.progress.control.append(self._control())

    def _look_ahead(self, t: int) -> None:
        """Accuracy on the next task before its lessons: what learning others did for it."""
        expert = next(iter(self.experts().values()))
        for j in self.stream.groups[t]:
            ahead = self._accuracy(expert, j, range(j + 1))
            self.progress.ahead = [*self.progress.ahead[:j], ahead]

    def _measure(self, t: int, when: str, same: bool = False) -> None:
        """Row t of the matrix of every expert; `same` copies what was measured before."""
        seen = self.stream.seen(t)
        with self._timed("measuring", t):
            for name, expert in self.experts().items():
                both = self.progress.matrices.setdefault(name, {"before": [], "after": []})
                if same:
                    row = both["before"][t]
                else:
                    row = [None] * len(self.stream.tasks)
                    for j in seen:
                        row[j] = self._accuracy(expert, j, seen)
                both[when] = [*both[when][:t], row]
        phase = {"before": "lessons", "after": "stream"}[when]
        distances = self.progress.distance[phase]
        self.progress.distance[phase] = [*distances[:t], self._distance()]
        if when == "after":
            first = next(iter(self.progress.matrices.values()))
            self.watch.measured(t, [x for x in first["after"][t] if x is not None])

    def experts(self) -> Mapping[str, Backbone]:
        return self.learner.method.experts(self.learner.student)

    def _names(self, tasks: Iterable[int]) -> dict[str, Prompts]:
        chosen = [self.stream.tasks[j] for j in tasks]
        return {name: task.prompts for task in chosen for name in task.classes}

    def _start(self, j: int) -> int:
        return sum(len(task.classes) for task in self.stream.tasks[:j])

    def _accuracy(self, expert: Backbone, j: int, seen: Iterable[int]) -> float:
        """Per cent of task j's test pictures whose nearest class, of all those seen, is theirs."""
        test = self.stream.tasks[j].test
        answers = self._answers(expert, test, self._names(seen)) - self._start(j)
        return 100 * float((answers == test.labels).mean())

    def _answers(
        self, expert: Backbone, test: Labelled, names: Mapping[str, Prompts]
    ) -> np.ndarray:
        batches = (self.learner.logits(x, expert, names).argmax(dim=1) for x in test.batches(LOOK))
        return torch.cat(list(batches)).numpy()

    def _control(self) -> float:
        right: list[float] = []
        expert = next(iter(self.experts().values()))
        for control, prompts in self.stream.controls:
            part = Labelled.of(
                control.test, np.arange(len(control.test.labels)), control.test.labels
            )
            names = dict.fromkeys(control.classes, prompts)
            right += list(self._answers(expert, part, names) == part.labels)
        return 100 * float(np.mean(right)) if right else float("nan")

    def _distance(self) -> float:
        """‖θ^T - θ^S‖ over the weights that can differ."""
        mine = self.learner.student.net.weights()
        total = 0.0
        for expert in self.experts().values():
            for name, theirs in expert.weights().items():
                if theirs is not mine[name]:
                    total += (theirs - mine[name]).detach().square().sum().item()
        return math.sqrt(total)

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
        metrics["control_accuracy"] = self._control()
        metrics["control_kept"] = metrics["control_accuracy"] - progress.control[0]
        sessions = range(len(stream.groups))
        return Result(
            key=self.key,
            settings=self.settings.model_dump(mode="json"),
            label=label(self.settings),
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
            per_class=self._per_class(),
            tasks=[
                {
                    "classes": list(task.classes),
                    "train": len(task.train),
                    "stream": len(task.field),
                    "test": len(task.test),
                }
                for task in stream.tasks
            ],
            stream={
                "name": stream.name,
                "hash": stream.hash,
                "images": [len(stream.session(t).unlabelled) for t in sessions],
                "boundaries": list(stream.boundaries),
            },
            pseudo_labels=_shares(progress.right, progress.guessed, 100),
            disagreement=_shares(progress.differed, progress.guessed, 100),
            distance=progress.distance,
            steps=progress.steps,
            seconds={k: [round(s, 3) for s in v] for k, v in progress.seconds.items()},
            backbone={
                "name": self.settings.backbone,
                "fingerprint": self.learner.fingerprint,
            },
            weights=self.learner.digest(),
            libraries={
                name: importlib.metadata.version(name)
                for name in ("dosapp", "torch", "transformers", "numpy")
            },
            machine=f"{platform.machine()}, {torch.get_num_threads()} threads",
            finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )

    def _per_class(self) -> dict[str, float]:
        expert = next(iter(self.experts().values()))
        names = self._names(range(len(self.stream.tasks)))
        found = {}
        for j, task in enumerate(self.stream.tasks):
            answers = self._answers(expert, task.test, names) - self._start(j)
            for n, name in enumerate(task.classes):
                mine = task.test.labels == n
                found[name] = 100 * float((answers[mine] == n).mean())
        return found


def _shares(parts: list[Any], wholes: list[int], times: float) -> list[float | None]:
    return [times * p / w if w else None for p, w in zip(parts, wholes, strict=True)]


def settings_from(path: Path | None, flags: Mapping[str, Any]) -> RunSettings:
    """A file's settings with the flags on top."""
    values = read_yaml(path) if path else {}
    options = {**(values.get("options") or {}), **flags.get("options", {})}
    merged = {**values, **flags, "options": options}
    found: RunSettings = RunSettings.checked(merged, str(path) if path else "the settings")
    return found
