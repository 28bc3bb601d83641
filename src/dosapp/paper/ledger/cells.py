"""One number of the paper beside ours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dosapp.data.paper_sets.datasets import PaperDataset
from dosapp.experiments.result import Result
from dosapp.paper.ledger.verdicts import interval
from dosapp.paper.reproduce import Row, command
from dosapp.settings import RunSettings

BACKBONE = "ViT-B-16"  # the paper's
# What is called reproduced: a mean as near to the paper's as a point, or as its own 95 % interval
# if that is wider, but two points at most.
POINT, POINTS = 1.0, 2.0


@dataclass(frozen=True)
class Cell:
    """One number of the paper beside ours."""

    row: Row
    data: str
    metric: str
    published: float | None
    results: Sequence[Result]
    settings: RunSettings
    asked: int  # seeds of the scale
    paper_scale: bool

    @cached_property
    def values(self) -> list[float]:
        found = [value_of(result, self.metric, self.row.session) for result in self.results]
        return [value for value in found if value is not None]

    @property
    def mean(self) -> float | None:
        return float(np.mean(self.values)) if self.values else None

    @property
    def std(self) -> float | None:
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    @property
    def status(self) -> str:
        """Only at the paper's scale is a number set against the paper's."""
        if not self.values:
            return "not at this scale" if self.results and self.row.session else "not run"
        if not self.paper_scale:
            return "run"
        if self.foreign:
            return f"run with another {self.foreign}"
        return "not published" if self.difference is None else self._beside(self.difference)

    def _beside(self, difference: float) -> str:
        if self.row.inconsistent:
            return "paper inconsistent"
        if len(self.values) < self.asked:
            return f"run with {len(self.values)} of {self.asked} seeds"
        near = min(POINTS, max(POINT, interval(self.values)))
        return "reproduced" if abs(difference) <= near else "differs"

    @property
    def foreign(self) -> str:
        """What was not the paper's, in any of the results."""
        said = (foreign(self.data, r.backbone["name"], r.tasks) for r in self.results)
        return next(filter(None, said), "")

    @property
    def difference(self) -> float | None:
        """To the paper's, where there is something to compare."""
        if self.published is None or self.mean is None or self.foreign:
            return None
        return self.mean - self.published

    def facts(self) -> dict[str, Any]:
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
            "command": command(self.settings),
            "stream": [result.stream["hash"] for result in self.results],
            "left_out": max((r.stream.get("left_out", 0) for r in self.results), default=0),
            "steps": first.steps["stream"] if first else None,
            "backbone": first.backbone["fingerprint"] if first else None,
            "machine": " / ".join(dict.fromkeys(r.machine for r in self.results)) or None,
            "finished": max((result.finished for result in self.results), default=None),
        }


def foreign(data: str, backbone: str, tasks: Sequence[Mapping[str, Any]]) -> str:
    """What is not the paper's: pictures by their number, a backbone by its (folder's) name."""
    release = [PaperDataset.from_name(name) for name in data.split("+")]
    taught, asked = (sum(known.images[part] for known in release) for part in ("train", "test"))
    odd = sum(len(known.classes) for known in release)  # halves of a class with an odd number
    tests = sum(task["test"] for task in tasks)
    whole, half = tests == asked, abs(2 * tests - asked) <= odd
    if sum(task["train"] for task in tasks) != taught or not (whole or half):
        return "number of pictures"
    return "" if Path(backbone).name == BACKBONE else "backbone"


def value_of(result: Result, metric: str, session: int | None = None) -> float | None:
    """A metric; `previous_tasks.after` is of one session, or the mean after the first."""
    name, _, part = metric.partition(".")
    if not part:
        return result.metrics.get(name)
    line = getattr(result, name)[part]
    if session is not None:
        return line[session] if session < len(line) else None
    later = [value for value in line[1:] if value is not None]
    return float(np.mean(later)) if later else None
