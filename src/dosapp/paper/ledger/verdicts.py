"""Verdicts on the paper's claims, from confidence intervals of paired differences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dosapp.experiments.result import Result
from dosapp.paper.reproduce import LOWER_IS_BETTER

# Student's t of a two-sided 95 % interval, by degrees of freedom; beyond them the normal quantile.
T95 = (
    *(12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13),
    *(2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04),
)


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper, and whether our paired differences support it."""

    better: str
    than: str
    metric: str
    difference: float | None  # better minus than, mean over pairs
    half_interval: float | None  # half of its 95 % interval
    pairs: int
    outcome: str
    excluded: tuple[str, ...] = ()  # datasets on which the paper's own numbers contradict the claim
    uninformative: tuple[str, ...] = ()  # datasets that say nothing, with the reason

    def to_dict(self) -> dict[str, Any]:
        """The verdict as it is stored in a ledger."""
        return {
            "better": self.better,
            "than": self.than,
            "metric": self.metric,
            "difference": self.difference,
            "half": self.half_interval,
            "pairs": self.pairs,
            "said": self.outcome,
            "besides": list(self.excluded),
            "uninformative": list(self.uninformative),
        }


MIN_GAIN = 3.0  # points of joint training over zero-shot, without which there is nothing to learn
MIN_CHANGE = 1.0  # mean change of a cell of R, in points, without which a model is still zero-shot


def find_uninformative(
    results: Sequence[Result], zero_shot: Mapping[int, Result], joint: Mapping[int, Result]
) -> str:
    """Say why results cannot support a claim or contradict it.

    Args:
        results: The results that the claim compares, of any seed.
        zero_shot: Results of the untouched model on the same data, by seed.
        joint: Results of joint training on the same data, by seed.

    Returns:
        A reason; empty if there is none, or if nothing is known about it.
    """
    for seed, result in joint.items():
        before = result.metrics["zero_shot_accuracy"]
        after = result.metrics["accuracy"]
        if before is not None and after is not None and after - before < MIN_GAIN:
            return f"joint training gains {after - before:.1f} points over zero-shot, seed {seed}"
    for result in results:
        untouched = zero_shot.get(result.settings["seed"])
        if untouched is None or result.settings["method"] == "zero-shot":
            continue
        if result.matrix.shape != untouched.matrix.shape:  # joint training has one session
            continue
        if float(np.nanmean(np.abs(result.matrix - untouched.matrix))) < MIN_CHANGE:
            return f"{result.label} never left zero-shot"
    return ""


def half_interval(values: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of a mean.

    Example:
        >>> round(half_interval([1.0, 2.0, 3.0]), 2)
        2.48
    """
    if len(values) < 2:
        return math.inf
    freedom = len(values) - 1
    factor = T95[freedom - 1] if freedom <= len(T95) else 1.96
    return factor * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def judge_claim(better: str, than: str, metric: str, differences: Sequence[float]) -> Verdict:
    """Judge a claim by the 95 % interval of the mean paired difference.

    Args:
        better: Row that the claim says is better.
        than: Row that it is compared with.
        metric: The metric; less is better for forgetting and seconds.
        differences: `better` minus `than`, one per pair of results.

    Returns:
        `agrees` or `disagrees` if the interval excludes zero, otherwise `within noise`.

    Example:
        >>> judge_claim("A", "B", "accuracy", [2.0, 2.5, 3.0]).outcome
        'agrees'
    """
    count = len(differences)
    if count < 2:
        only = float(differences[0]) if count else None
        return Verdict(better, than, metric, only, None, count, "too few" if count else "not run")
    mean, half = float(np.mean(differences)), half_interval(differences)
    gain = -mean if metric.partition(".")[0] in LOWER_IS_BETTER else mean
    outcome = "within noise" if abs(mean) <= half else ("agrees" if gain > 0 else "disagrees")
    return Verdict(better, than, metric, mean, half, count, outcome)
