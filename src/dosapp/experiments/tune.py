"""Choose a learning rate on the training images of the first task alone.

80 % of these images train, 20 % validate. D^u, D^e and later tasks are never read. Nothing else is
tuned: one task says nothing about forgetting. Among the rates that do not differ from the best by
more than the standard error of the difference, the smallest is chosen: it changes the weights
least.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dosapp.backbones.registry import load_backbone
from dosapp.data.images import LabelledImages
from dosapp.errors import DivergedError, InputError
from dosapp.experiments.evaluator import EVAL_BATCH_SIZE
from dosapp.experiments.optuna_search import propose_rates
from dosapp.experiments.plan import build_scenario, resolve_training
from dosapp.learner.learner import Learner
from dosapp.learner.training_defaults import split_session
from dosapp.methods.registry import get_method, import_methods
from dosapp.runtime.files import write_bytes
from dosapp.scenario import Session
from dosapp.settings import RunSettings, read_yaml

RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)


@dataclass(frozen=True)
class Trial:
    """A learning rate and its validation accuracy."""

    lr: float
    accuracy: float  # per cent, mean over seeds
    error: float  # standard error of that mean

    @classmethod
    def from_counts(cls, lr: float, correct: int, total: int) -> "Trial":
        """Build a trial from the number of correct predictions."""
        p = (correct + 1) / (total + 2)  # Laplace smoothing: 100 % correct has an error, too
        return cls(lr, 100 * correct / total, 100 * math.sqrt(p * (1 - p) / total))


@dataclass(frozen=True)
class TuningResult:
    """The chosen learning rate of a method, with all trials."""

    method: str
    lr: float
    trials: list[Trial]
    images: dict[str, int]  # by use: teach (training) and score (validation)

    def check(self) -> None:
        """Raise an `InputError` if all rates are equally good, so that none was chosen."""
        if len(self.trials) > 1 and len({trial.accuracy for trial in self.trials}) == 1:
            raise InputError(
                f"every rate has {self.trials[0].accuracy:.1f} % on {self.images['score']} "
                "held-out images, so there is nothing to choose; give a first task with more "
                "classes or more images, more epochs, or other --rates"
            )

    def explain(self) -> str:
        """Why this rate was chosen, in words, and how to use it.

        Example:
            >>> trials = [Trial(1e-4, 98.7, 0.7), Trial(1e-3, 99.2, 0.6)]
            >>> print(TuningResult("spu", 1e-4, trials, {"score": 80}).explain())
            spu: --lr 0.0001 (98.7 %), the smallest within the error of the best, 0.001 (99.2 %)
        """
        best = max(self.trials, key=lambda trial: trial.accuracy)
        chosen = next(trial for trial in self.trials if trial.lr == self.lr)
        text = f"{self.method}: --lr {self.lr:g} ({chosen.accuracy:.1f} %), "
        if best.lr == self.lr:
            return text + "the best rate"
        return (
            text + f"the smallest within the error of the best, {best.lr:g} ({best.accuracy:.1f} %)"
        )

    def evidence(self) -> dict[str, Any]:
        """The part of the rates file that supports the choice."""
        return {
            "images": self.images,
            "accuracy": {f"{t.lr:g}": f"{t.accuracy:.1f} ± {t.error:.1f}" for t in self.trials},
        }


@dataclass
class TunedRates:
    """A file of learning rates, with the evidence for each and the commands that wrote it.

    Rates of `tiny` are at the top, those of other backbones under `backbones` and their names.
    """

    rates: dict[str, float] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)  # evidence, under its key in the file
    commands: list[str] = field(default_factory=list)
    backbones: dict[str, dict[str, Any]] = field(default_factory=dict)  # name → rates and seen

    @classmethod
    def read(cls, file: Path) -> "TunedRates":
        """Read a file, to add to it; a missing file is empty."""
        if not file.exists():
            return cls()
        values, lines = read_yaml(file), file.read_text().splitlines()
        known = ("rates", "seen", "backbones")
        unknown = next((key for key in values if key not in known), None)
        if unknown is not None:
            raise InputError(f"'{file}' has '{unknown}', so it is no file of rates; choose another")
        return cls(**values, commands=[line for line in lines if line.startswith("#")])

    def add(self, tuned: TuningResult, backbone: str = "tiny") -> None:
        """Add or replace the rate of a method with a backbone."""
        rates, seen = self.rates, self.seen
        if backbone != "tiny":
            own = self.backbones.setdefault(backbone, {"rates": {}, "seen": {}})
            rates, seen = own["rates"], own["seen"]
        rates[tuned.method] = tuned.lr
        seen[tuned.method] = tuned.evidence()

    def to_dict(self) -> dict[str, Any]:
        """The content of the file; without other backbones it has the form of version 0.1."""
        others = {"backbones": self.backbones} if self.backbones else {}
        return {"rates": self.rates, "seen": self.seen, **others}

    def write(self, file: Path, command: str) -> None:
        """Write the file; the command becomes a comment at its top."""
        text = yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)
        head = [*self.commands, f"# {command}"]
        write_bytes(file, ("\n".join(head) + "\n" + text).encode())


def tune(
    settings: RunSettings,
    *,
    rates: Sequence[float] = RATES,
    seeds: int = 3,
    trials: int | None = None,
    on_trial: Callable[[str, float, int], None] = lambda method, lr, seed: None,
) -> TuningResult:
    """Train on the first task with each learning rate and choose one.

    Args:
        settings: The run; its learning rate and seed are ignored.
        rates: Learning rates to try; with `trials`, the ends of the range that is searched.
        seeds: Number of seeds per rate.
        trials: Number of rates that Optuna proposes, instead of trying those given.
        on_trial: Called with method, rate and seed before each training.

    Returns:
        The chosen rate and all trials.
    """
    import_methods(settings.method)
    settings = resolve_training(settings)
    check_tunable(settings)
    tried, images = dict[float, Trial](), {"teach": 0, "score": 0}
    if trials is None:
        candidates: Iterable[float] = rates
    else:
        candidates = propose_rates(min(rates), max(rates), trials, lambda lr: tried[lr].accuracy)
    for lr in candidates:
        correct: list[bool] = []
        for seed in range(seeds):
            on_trial(settings.method, lr, seed)
            session, validation = split_first_session(settings.model_copy(update={"seed": seed}))
            images = {"teach": len(session.train), "score": len(validation)}
            learner = Learner(settings.learner().model_copy(update={"lr": lr, "seed": seed}))
            try:
                learner.learn(session)
            except DivergedError:  # counts as no correct prediction
                correct += [False] * len(validation)
                continue
            batches = validation.batches(EVAL_BATCH_SIZE)
            predicted = [p.label for pixels in batches for p in learner.predict(pixels, top=1)]
            labels = [session.classes[label] for label in validation.labels]
            correct += [a == b for a, b in zip(predicted, labels, strict=True)]
        tried[lr] = Trial.from_counts(lr, sum(correct), len(correct))
    found = list(tried.values())
    return TuningResult(settings.method, choose_rate(found), found, images)


def check_tunable(settings: RunSettings) -> None:
    """Raise an `InputError` if the first task cannot tell a good learning rate from a bad one."""
    if get_method(settings.method).phase == "none":
        raise InputError(f"'{settings.method}' never trains, so it has no learning rate to tune")
    session, _ = split_first_session(settings.model_copy(update={"seed": 0}))
    if len(session.classes) < 2:
        raise InputError(
            f"the first task has one class, '{session.classes[0]}', so every rate has 100 %; give "
            f"fewer --tasks than {settings.tasks}"
        )


def choose_rate(trials: list[Trial]) -> float:
    """The smallest rate that does not differ significantly from the best one.

    Example:
        >>> choose_rate([Trial(1e-4, 98.7, 0.7), Trial(1e-3, 99.2, 0.6)])
        0.0001
    """
    best = max(trials, key=lambda t: t.accuracy)
    close = [t for t in trials if best.accuracy - t.accuracy <= math.hypot(best.error, t.error)]
    return min(t.lr for t in close)


def split_first_session(settings: RunSettings) -> tuple[Session, LabelledImages]:
    """Split the training images of the first task.

    Returns:
        A session with four fifths of each class, and the other fifth for validation.

    Raises:
        InputError: A class has too few images.
    """
    scenario = build_scenario(settings, load_backbone(settings.backbone).preprocess)
    return split_session(scenario.session(0), settings.seed)
