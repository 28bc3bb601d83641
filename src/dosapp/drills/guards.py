"""Harmful streams, with and without guards.

A learner is trained on every session of a benchmark and on none of its streams. Then it adapts to
one of six streams, each of one kind only; all are equally long. Every fourth held-out image of a
class is in the guards' canary, and accuracy is measured on the other three quarters. An interval
has five steps, with and without guards.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dosapp.data.preprocess import to_bytes
from dosapp.experiments.plan import build_scenario
from dosapp.history.record import State
from dosapp.learner.canary import Canary
from dosapp.learner.learner import Learner
from dosapp.runtime.rng import numpy_rng
from dosapp.scenario import Scenario
from dosapp.service.reader import Published
from dosapp.service.settings import ServiceSettings
from dosapp.service.stream import StreamSample
from dosapp.service.writer import Writer
from dosapp.settings import RunSettings

INTERVAL = 5
GUARDS_OFF = {
    "max_skew": 1.0, "max_disagreement": 1.0, "canary_drop": 100.0, "max_refusals": 10**6,
    "canary_margin": 1e9, "canary_pull": 1e9, "require_canary": False, "max_caller_share": 1.0,
}  # fmt: skip
CANARY_EVERY = 4  # held-out images of a class
JSON_KEYS = {
    "accuracy_before": "frozen", "accuracy_after": "lived", "accuracies": "course",
    "frozen_because": "said",
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What one stream did to a learner."""

    stream: str
    guards: bool
    seed: int
    accuracy_before: float
    accuracy_after: float
    accuracies: list[float]  # after every interval
    adapted: int
    held: int
    refused: int
    disagreement: float | None
    frozen_because: str  # empty if adaptation was not stopped

    @property
    def change(self) -> float:
        """Accuracy gained, in points."""
        return self.accuracy_after - self.accuracy_before


def drill(
    seeds: list[int],
    passes: int = 2,
    changes: dict[str, Any] | None = None,
    on_progress: Callable[[str], None] = lambda message: None,
) -> list[Outcome]:
    """Run every stream with and without guards.

    Args:
        seeds: One learner is trained per seed.
        passes: How often each stream is repeated.
        changes: Settings of the run that differ from the defaults.
        on_progress: Called with a message before each part.
    """
    outcomes = []
    for seed in seeds:
        settings: RunSettings = RunSettings.parse(
            {"data": "shapes", "seed": seed, **(changes or {})}
        )
        guard_drill = GuardDrill(settings, on_progress)
        for name, pixels in guard_drill.streams():
            for guards in (False, True):
                on_progress(f"seed {seed}: {name}, guards {'on' if guards else 'off'}")
                outcomes.append(
                    guard_drill.run_stream(name, pixels.repeat(passes, 1, 1, 1), guards)
                )
    return outcomes


class GuardDrill:
    """A trained learner, its held-out images, and the streams.

    Args:
        settings: Of the run whose sessions are learned.
        on_progress: Called with a message before each session.
    """

    def __init__(self, settings: RunSettings, on_progress: Callable[[str], None]) -> None:
        self.settings, self.learner = settings, Learner(settings.learner())
        self.preprocess = self.learner.student.backbone.preprocess
        self.scenario: Scenario = build_scenario(settings, self.preprocess)
        sessions = len(self.scenario.task_groups)
        for t in range(sessions):
            on_progress(f"seed {settings.seed}: training on session {t + 1} of {sessions}")
            self.learner.learn(self.scenario.session(t))
        canary_images: list[Tensor] = []
        canary_names: list[str] = []
        self.held_out: list[tuple[Tensor, list[str]]] = []  # images and class names of each task
        for task in self.scenario.tasks:
            images = to_bytes(task.test.read(range(len(task.test))))
            names = np.array(task.classes)[task.test.labels]
            in_canary = _every_fourth(task.test.labels)
            canary_images.append(images[in_canary])
            canary_names += names[in_canary].tolist()
            self.held_out.append((images[~in_canary], names[~in_canary].tolist()))
        self.canary = Canary.from_images(torch.cat(canary_images), canary_names)

    def accuracy(self, learner: Learner) -> float:
        """Mean accuracy over tasks, in per cent."""
        accuracies = [
            np.mean([a.label == n for a, n in zip(learner.predict(images, 1), names, strict=True)])
            for images, names in self.held_out
        ]
        return 100 * float(np.mean(accuracies))

    def streams(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and images `uint8 [n, 3, H, W]`, n the same for all."""
        rng = numpy_rng("guards", self.settings.seed)
        last = self.scenario.session(len(self.scenario.task_groups) - 1).unlabelled
        normal = to_bytes(last.read(rng.permutation(len(last))))
        count = len(normal)
        yield "normal", normal
        first = self.scenario.tasks[0].unlabelled
        one_class = to_bytes(first.read(np.flatnonzero(first.labels == 0)))
        yield "one class", one_class[torch.arange(count) % len(one_class)]
        noise = rng.integers(0, 256, normal.shape, dtype=np.uint8)
        yield "noise", torch.from_numpy(noise)
        order = np.argsort(rng.random((count, normal[0, 0].numel())), axis=1)
        flat = normal.flatten(2).gather(2, torch.from_numpy(order)[:, None].expand(-1, 3, -1))
        yield "shuffled pixels", flat.view_as(normal)
        yield "one image", normal[:1].expand(count, -1, -1, -1)
        signs = build_scenario(self.settings.model_copy(update={"data": "signs"}), self.preprocess)
        splits = [task.unlabelled for task in signs.tasks]
        other = torch.cat([to_bytes(split.read(range(len(split)))) for split in splits])
        yield "other domain", other[torch.from_numpy(rng.permutation(len(other))[:count])]

    def run_stream(self, name: str, pixels: Tensor, guards: bool) -> Outcome:
        """Adapt a copy of the learner to a stream as a service does: predict, then learn."""
        settings: ServiceSettings = ServiceSettings.parse(
            {"interval": INTERVAL, **({} if guards else GUARDS_OFF)}
        )
        state = self.learner.state()
        learner = self.learner.at(
            State({k: t.clone() for k, t in state.tensors.items()}, state.facts)
        )
        published = [Published(0, learner.at(state, trainable=False))]
        before = self.accuracy(published[0].learner)
        accuracies: list[float] = []

        def publish(version: Published) -> None:
            published[0] = version
            accuracies.append(self.accuracy(version.learner))

        with tempfile.TemporaryDirectory() as folder:
            history = learner.history(Path(folder))
            canary = self.canary if guards else None
            writer = Writer(learner, history, settings, publish, canary)
            for batch in pixels.split(settings.adapt_batch_size):
                if writer.frozen:
                    break
                predictions = published[0].learner.predict(batch, 1)
                writer.adapt(
                    [
                        StreamSample(image, prediction.label, prediction.score, 0.0)
                        for image, prediction in zip(batch, predictions, strict=True)
                    ]
                )
            writer.finish()
        signals = writer.signals
        disagreement = list(signals.disagreement)
        return Outcome(
            stream=name,
            guards=guards,
            seed=self.settings.seed,
            accuracy_before=before,
            accuracy_after=accuracies[-1] if accuracies else before,
            accuracies=accuracies,
            adapted=signals.adapted,
            held=signals.held,
            refused=signals.refused,
            disagreement=float(np.mean(disagreement)) if disagreement else None,
            frozen_because=writer.frozen,
        )


def _every_fourth(labels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """True for every fourth image of each class."""
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        chosen[np.flatnonzero(labels == label)[::CANARY_EVERY]] = True
    return chosen


def to_json(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """The outcomes as they are in `guards.json`."""
    return [{JSON_KEYS.get(k, k): v for k, v in asdict(o).items()} for o in outcomes]


def format_table(outcomes: list[Outcome]) -> str:
    """Format mean ± standard deviation over seeds of each stream's change, in points."""
    lines = [
        "| stream | without guards | with guards | held | refused | stopped |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(o.stream for o in outcomes):
        off, on = (
            [o for o in outcomes if o.stream == name and o.guards is guards]
            for guards in (False, True)
        )
        total = sum(o.adapted + o.held for o in on)
        held = sum(o.held for o in on) / total if total else 0.0
        stopped = sum(bool(o.frozen_because) for o in on)
        lines.append(
            f"| {name} | {_format_change(off)} | {_format_change(on)} | {held:.0%} | "
            f"{sum(o.refused for o in on)} | {stopped} of {len(on)} |"
        )
    return "\n".join(lines) + "\n"


def _format_change(outcomes: list[Outcome]) -> str:
    changes = np.array([o.change for o in outcomes])
    spread = f" ± {changes.std(ddof=1):.2f}" if len(changes) > 1 else ""
    return f"{changes.mean():+.2f}{spread}"


def gain_kept(outcomes: list[Outcome]) -> float:
    """The share of the unguarded gain on the normal stream that remains with guards."""
    off, on = (
        np.mean([o.change for o in outcomes if o.stream == "normal" and o.guards is guards])
        for guards in (False, True)
    )
    return float(on / off)
