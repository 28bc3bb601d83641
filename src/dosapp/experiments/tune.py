"""First-task tuning: choose a learning rate from the first task's lessons and nothing else.

80 % of task 1's training images teach, the other 20 % score. D^u, D^e and later tasks are never
opened. Only the rate is chosen: nothing about forgetting can be identified on one task. Of the
rates that cannot be told apart from the best one (their difference is within its standard error),
the smallest wins: it moves the weights least.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dosapp.backbones.registry import load_backbone
from dosapp.data.images import LabelledImages
from dosapp.errors import DivergedError, InputError
from dosapp.experiments.evaluator import EVAL_BATCH_SIZE
from dosapp.experiments.plan import build_scenario
from dosapp.learner.learner import Learner
from dosapp.runtime.files import write_bytes
from dosapp.runtime.rng import numpy_rng
from dosapp.scenario import Session
from dosapp.settings import RunSettings, read_yaml

RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)


@dataclass(frozen=True)
class Trial:
    lr: float
    accuracy: float  # per cent, mean over seeds
    error: float  # standard error of that mean

    @classmethod
    def of(cls, lr: float, right: int, count: int) -> "Trial":
        p = (right + 1) / (count + 2)  # one success and one failure more: all right is not certain
        return cls(lr, 100 * right / count, 100 * math.sqrt(p * (1 - p) / count))


@dataclass(frozen=True)
class TuningResult:
    method: str
    lr: float
    tried: list[Trial]
    images: dict[str, int]

    def seen(self) -> dict[str, Any]:
        return {
            "images": self.images,
            "accuracy": {f"{t.lr:g}": f"{t.accuracy:.1f} ± {t.error:.1f}" for t in self.tried},
        }


@dataclass
class TunedRates:
    """A file of chosen rates: each with what was seen when it was chosen, and the command."""

    rates: dict[str, float] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> "TunedRates":
        """What was tuned before stays."""
        if not file.exists():
            return cls()
        found, lines = read_yaml(file), file.read_text().splitlines()
        strange = next((key for key in found if key not in ("rates", "seen")), None)
        if strange is not None:
            raise InputError(f"'{file}' has '{strange}', so it is no file of rates; choose another")
        return cls(**found, commands=[line for line in lines if line.startswith("#")])

    def add(self, tuned: TuningResult) -> None:
        self.rates[tuned.method] = tuned.lr
        self.seen[tuned.method] = tuned.seen()

    def write(self, file: Path, command: str) -> None:
        values = {"rates": self.rates, "seen": self.seen}
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        head = [*self.commands, f"# {command}"]
        write_bytes(file, ("\n".join(head) + "\n" + text).encode())


def tune(
    settings: RunSettings,
    *,
    rates: Iterable[float] = RATES,
    seeds: int = 3,
    watch: Callable[[str, float, int], None] = lambda method, lr, seed: None,
) -> TuningResult:
    tried, images = [], {"teach": 0, "score": 0}
    for lr in rates:
        right: list[bool] = []
        for seed in range(seeds):
            watch(settings.method, lr, seed)
            teach, held = split_first_session(settings.model_copy(update={"seed": seed}))
            images = {"teach": len(teach.train), "score": len(held)}
            learner = Learner(settings.learner().model_copy(update={"lr": lr, "seed": seed}))
            try:
                learner.learn(teach)
            except DivergedError:  # the worst a rate can do
                right += [False] * len(held)
                continue
            asked = held.batches(EVAL_BATCH_SIZE)
            answers = [p.label for pixels in asked for p in learner.predict(pixels, top=1)]
            truth = [teach.classes[label] for label in held.labels]
            right += [a == b for a, b in zip(answers, truth, strict=True)]
        tried.append(Trial.of(lr, sum(right), len(right)))
    return TuningResult(settings.method, choose_rate(tried), tried, images)


def choose_rate(tried: list[Trial]) -> float:
    best = max(tried, key=lambda t: t.accuracy)
    return min(t.lr for t in tried if best.accuracy - t.accuracy <= math.hypot(best.error, t.error))


def split_first_session(settings: RunSettings) -> tuple[Session, LabelledImages]:
    """Task 1's training images, four fifths of each class to teach and one to score."""
    stream = build_scenario(settings, load_backbone(settings.backbone).preprocess)
    first = stream.session(0)
    teach: list[int] = []
    score: list[int] = []
    for label in range(len(first.classes)):
        rows = np.flatnonzero(first.train.labels == label)
        rows = numpy_rng("tune", settings.seed, label).permutation(rows)
        cut = round(0.8 * len(rows))
        if cut == len(rows):
            raise InputError(
                f"class '{first.classes[label]}' has {len(rows)} training images; "
                "tuning needs at least 3 to hold one out"
            )
        teach += rows[:cut].tolist()
        score += rows[cut:].tolist()
    taught, held = (first.train.subset(np.array(sorted(rows))) for rows in (teach, score))
    return Session(first.classes, first.prompts, taught, taught.empty()), held
