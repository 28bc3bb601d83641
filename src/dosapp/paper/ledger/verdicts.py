"""A claim of the paper, judge_claim by the interval of paired differences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dosapp.paper.reproduce import LOWER

# Student's t for a two-sided 95 % interval, by degrees of freedom; beyond them the normal's.
T95 = (
    *(12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13),
    *(2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04),
)


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper, and what our paired differences say of it."""

    better: str
    than: str
    metric: str
    difference: float | None  # better less than, mean over pairs
    half: float | None  # half of its 95 % interval
    pairs: int
    said: str
    besides: tuple[str, ...] = ()  # datasets on which the paper's own numbers say otherwise

    def facts(self) -> dict[str, Any]:
        return {**vars(self), "besides": list(self.besides)}


def interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean."""
    if len(values) < 2:
        return math.inf
    freedom = len(values) - 1
    factor = T95[freedom - 1] if freedom <= len(T95) else 1.96
    return factor * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def judge_claim(better: str, than: str, metric: str, differences: Sequence[float]) -> Verdict:
    """`agrees` or `disagrees` if the 95 % interval of the paired difference leaves out zero."""
    count = len(differences)
    if count < 2:
        only = float(differences[0]) if count else None
        return Verdict(
            better, than, metric, only, None, count, "not run" if not count else "too few"
        )
    mean, half = float(np.mean(differences)), interval(differences)
    right = -mean if metric.partition(".")[0] in LOWER else mean
    said = "within noise" if abs(mean) <= half else ("agrees" if right > 0 else "disagrees")
    return Verdict(better, than, metric, mean, half, count, said)
