"""Cells of a ledger: one number of the paper beside ours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dosapp.data.paper_sets.datasets import PaperDataset
from dosapp.experiments.result import Result
from dosapp.paper.ledger.verdicts import half_interval
from dosapp.paper.reproduce import Row, format_command
from dosapp.settings import RunSettings

BACKBONE = "ViT-B-16"  # the paper's
# "reproduced": the means differ by at most TOLERANCE, or by half of our 95 % interval if that is
# wider, but never by more than MAX_TOLERANCE points.
TOLERANCE, MAX_TOLERANCE = 1.0, 2.0


@dataclass(frozen=True)
class Cell:
    """A published number, and the results that reproduce it."""

    row: Row
    data: str
    metric: str
    published: float | None
    results: Sequence[Result]
    settings: RunSettings  # of the first seed
    expected_seeds: int
    paper_scale: bool

    @cached_property
    def values(self) -> list[float]:
        """Our value of each seed."""
        values = [read_metric(result, self.metric, self.row.session) for result in self.results]
        return [value for value in values if value is not None]

    @property
    def mean(self) -> float | None:
        """Our mean over seeds."""
        return float(np.mean(self.values)) if self.values else None

    @property
    def std(self) -> float | None:
        """Our standard deviation over seeds."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    @property
    def status(self) -> str:
        """The state of the cell; numbers are compared at the paper's scale only."""
        if not self.values:
            return "not at this scale" if self.results and self.row.session else "not run"
        if not self.paper_scale:
            return "run"
        if self.mismatch:
            return f"run with another {self.mismatch}"
        return "not published" if self.difference is None else self._compare(self.difference)

    def _compare(self, difference: float) -> str:
        if self.row.inconsistent:
            return "paper inconsistent"
        if len(self.values) < self.expected_seeds:
            return f"run with {len(self.values)} of {self.expected_seeds} seeds"
        tolerance = min(MAX_TOLERANCE, max(TOLERANCE, half_interval(self.values)))
        return "reproduced" if abs(difference) <= tolerance else "differs"

    @property
    def mismatch(self) -> str:
        """What differs from the paper in any of the results; empty if nothing does."""
        mismatches = (find_mismatch(self.data, r.backbone["name"], r.tasks) for r in self.results)
        return next(filter(None, mismatches), "")

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's, where they can be compared."""
        if self.published is None or self.mean is None or self.mismatch:
            return None
        return self.mean - self.published

    def to_dict(self) -> dict[str, Any]:
        """The cell as it is stored in a ledger, with command and provenance."""
        first = self.results[0] if self.results else None
        return {
            "row": self.row.name,
            "data": self.data,
            "metric": self.metric,
            "paper": self.published,
            "ours": self.mean,
            "std": self.std,
            "difference": self.difference,
            "seeds": len(self.values),
            "status": self.status,
            "note": self.row.inconsistent,
            "command": format_command(self.settings),
            "stream": [result.stream["hash"] for result in self.results],
            "left_out": max((r.stream.get("left_out", 0) for r in self.results), default=0),
            "steps": first.steps["stream"] if first else None,
            "backbone": first.backbone["fingerprint"] if first else None,
            "machine": " / ".join(dict.fromkeys(r.machine for r in self.results)) or None,
            "finished": max((result.finished for result in self.results), default=None),
        }


def find_mismatch(data: str, backbone: str, tasks: Sequence[Mapping[str, Any]]) -> str:
    """Name what differs from the paper's setup, judged by image counts and the backbone's name.

    Args:
        data: The paper's dataset, or two joined by `+`.
        backbone: Name or folder of the backbone.
        tasks: Numbers of images per task: `train` and `test`.

    Returns:
        `number of images`, `backbone`, or an empty string.
    """
    releases = [PaperDataset.from_name(name) for name in data.split("+")]
    train, test = (sum(r.images[part] for r in releases) for part in ("train", "test"))
    rounding = sum(len(r.classes) for r in releases)  # halves of classes with an odd count
    evaluated = sum(task["test"] for task in tasks)
    is_whole, is_half = evaluated == test, abs(2 * evaluated - test) <= rounding
    if sum(task["train"] for task in tasks) != train or not (is_whole or is_half):
        return "number of images"
    return "" if Path(backbone).name == BACKBONE else "backbone"


def read_metric(result: Result, metric: str, session: int | None = None) -> float | None:
    """Read a metric of a result.

    Args:
        result: The result.
        metric: A key of `metrics`, or `previous_tasks.before` or `.after`.
        session: Session of `previous_tasks`, from 0; None: the mean over all but the first.
    """
    name, _, part = metric.partition(".")
    if not part:
        return result.metrics.get(name)
    values = getattr(result, name)[part]
    if session is not None:
        return values[session] if session < len(values) else None
    later = [value for value in values[1:] if value is not None]
    return float(np.mean(later)) if later else None
