"""Streams that should not be learned from, with and without guards.

A learner is taught every session of a benchmark and nothing of its streams. Then it meets one of
six streams, each of one kind from its first picture to its last; all are equally long. Every fourth
held-out picture of a class is the guards' canary, and accuracy is measured on the other three
quarters. An interval is five steps, with and without guards.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dosapp.backbones.registry import load_backbone
from dosapp.experiments.plan import build_scenario
from dosapp.history.record import State
from dosapp.learner.learner import Learner
from dosapp.runtime.rng import numpy_rng
from dosapp.scenario import Scenario
from dosapp.service.guards import Canary
from dosapp.service.reader import Published
from dosapp.service.settings import ServiceSettings
from dosapp.service.writer import StreamSample, Writer
from dosapp.settings import RunSettings

OFF = {"max_skew": 1.0, "max_disagreement": 1.0, "canary_drop": 100.0, "max_refusals": 10**6}
EVERY = 4  # of the held-out pictures of a class is the canary's


@dataclass(frozen=True)
class Outcome:
    stream: str
    guards: bool
    seed: int
    frozen: float  # accuracy of the learner as it was
    lived: float  # and of what answers after the stream
    course: list[float]  # in between, after every interval
    adapted: int
    held: int
    refused: int
    disagreement: float | None
    said: str

    @property
    def change(self) -> float:
        return self.lived - self.frozen


def drill(
    seeds: list[int],
    passes: int = 2,
    changes: dict[str, Any] | None = None,
    watch: Callable[[str], None] = lambda words: None,
) -> list[Outcome]:
    found = []
    for seed in seeds:
        stage = GuardDrill(
            RunSettings.parse({"data": "shapes", "seed": seed, **(changes or {})}), watch
        )
        for name, pixels in stage.streams():
            for guards in (False, True):
                watch(f"seed {seed}: {name}, guards {'on' if guards else 'off'}")
                found.append(stage.live(name, pixels.repeat(passes, 1, 1, 1), guards))
    return found


class GuardDrill:
    """A taught learner, and what may come to it."""

    def __init__(self, settings: RunSettings, watch: Callable[[str], None]) -> None:
        self.settings, self.net = settings, load_backbone(settings.backbone)
        self.stream: Scenario = build_scenario(settings, self.net.preprocess)
        self.learner = Learner(settings.learner())
        for t in range(len(self.stream.task_groups)):
            watch(
                f"seed {settings.seed}: teaching session {t + 1} of {len(self.stream.task_groups)}"
            )
            self.learner.learn(self.stream.session(t))
        tests = [task.test for task in self.stream.tasks]
        pictures = [test.read(range(len(test))) for test in tests]
        names = [np.array(task.classes)[task.test.labels].tolist() for task in self.stream.tasks]
        watched = [_every(test.labels) for test in tests]
        self.canary = Canary(
            torch.cat([_bytes(p[w]) for p, w in zip(pictures, watched, strict=True)]),
            [
                n
                for ns, w in zip(names, watched, strict=True)
                for n, k in zip(ns, w, strict=True)
                if k
            ],
        )
        self.evaluator = [
            (_bytes(p[~w]), [n for n, k in zip(ns, w, strict=True) if not k])
            for p, ns, w in zip(pictures, names, watched, strict=True)
        ]

    def accuracy(self, learner: Learner) -> float:
        """Mean over tasks, in per cent."""
        right = [
            np.mean([a.label == n for a, n in zip(learner.predict(p, 1), names, strict=True)])
            for p, names in self.evaluator
        ]
        return 100 * float(np.mean(right))

    def streams(self) -> Iterator[tuple[str, Tensor]]:
        """Each `uint8 [n, 3, H, W]`, n the same for all."""
        random = numpy_rng("guards", self.settings.seed)
        last = self.stream.session(len(self.stream.task_groups) - 1).unlabelled
        normal = _bytes(last.read(random.permutation(len(last))))
        count = len(normal)
        yield "normal", normal
        first = self.stream.tasks[0].unlabelled
        one = _bytes(first.read(np.flatnonzero(first.labels == 0)))
        yield "one class", one[torch.arange(count) % len(one)]
        noise = random.integers(0, 256, normal.shape, dtype=np.uint8)
        yield "noise", torch.from_numpy(noise)
        places = np.argsort(random.random((count, normal[0, 0].numel())), axis=1)
        flat = normal.flatten(2).gather(2, torch.from_numpy(places)[:, None].expand(-1, 3, -1))
        yield "shuffled pixels", flat.view_as(normal)
        yield "one image", normal[:1].expand(count, -1, -1, -1)
        other = self.settings.model_copy(update={"data": "signs"})
        far = build_scenario(other, self.net.preprocess)
        strange = torch.cat(
            [_bytes(t.unlabelled.read(range(len(t.unlabelled)))) for t in far.tasks]
        )
        yield "other domain", strange[torch.from_numpy(random.permutation(len(strange))[:count])]

    def live(self, name: str, pixels: Tensor, guards: bool) -> Outcome:
        """One stream, in the order a service would do it: answer, then learn."""
        settings = ServiceSettings.parse({"interval": 5} if guards else {"interval": 5, **OFF})
        state = self.learner.state()
        learner = self.learner.at(
            State({k: t.clone() for k, t in state.tensors.items()}, state.facts)
        )
        published = [Published(0, learner.at(state, learns=False))]
        before = self.accuracy(published[0].learner)
        course: list[float] = []

        def publish(made: Published) -> None:
            published[0] = made
            course.append(self.accuracy(made.learner))

        with tempfile.TemporaryDirectory() as folder:
            history = learner.history(Path(folder))
            canary = self.canary if guards else None
            writer = Writer(learner, history, settings, publish, canary)
            for some in pixels.split(settings.adapt_batch_size):
                if writer.frozen:
                    break
                answers = published[0].learner.predict(some, 1)
                writer.adapt(
                    [
                        StreamSample(p, a.label, a.score, 0.0)
                        for p, a in zip(some, answers, strict=True)
                    ]
                )
            writer.finish()
        signals = writer.signals
        differ = list(signals.disagreement)
        return Outcome(
            name,
            guards,
            self.settings.seed,
            before,
            course[-1] if course else before,
            course,
            signals.adapted,
            signals.held,
            signals.refused,
            float(np.mean(differ)) if differ else None,
            writer.frozen,
        )


def _bytes(pixels: Tensor) -> Tensor:
    return (pixels * 255).round().byte()


def _every(labels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """True for every fourth picture of each class."""
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        chosen[np.flatnonzero(labels == label)[::EVERY]] = True
    return chosen


def facts(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    return [asdict(outcome) for outcome in outcomes]


def table(outcomes: list[Outcome]) -> str:
    """Mean ± standard deviation over seeds of what a stream changes, in points."""
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
        lines.append(
            f"| {name} | {_spread(off)} | {_spread(on)} | {held:.0%} | "
            f"{sum(o.refused for o in on)} | {sum(bool(o.said) for o in on)} of {len(on)} |"
        )
    return "\n".join(lines) + "\n"


def _spread(outcomes: list[Outcome]) -> str:
    changes = np.array([o.change for o in outcomes])
    spread = f" ± {changes.std(ddof=1):.2f}" if len(changes) > 1 else ""
    return f"{changes.mean():+.2f}{spread}"


def kept(outcomes: list[Outcome]) -> float:
    """The share of the normal stream's gain that guards leave."""
    off, on = (
        np.mean([o.change for o in outcomes if o.stream == "normal" and o.guards is guards])
        for guards in (False, True)
    )
    return float(on / off)
