"""Rows that differ in one number: what it does to the result."""

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dosapp.errors import InputError
from dosapp.experiments.result import Result, full_settings
from dosapp.methods.registry import build_method
from dosapp.report.tables import Row

FEWEST = 3  # values that make a line


@dataclass(frozen=True)
class Sweep:
    setting: str
    label: str
    points: Sequence[tuple[float, Row]]  # by value


def sweeps(rows: Sequence[Row]) -> Iterator[Sweep]:
    """Every number of which the rows have three values or more, all else being equal."""
    said = [_said(row.results[0]) for row in rows]
    names = {n for one in said for n, value in one.items() if _is_number(value)}
    for name in sorted(names - {"lr"}):
        groups: dict[str, dict[float, Row]] = {}
        for row, one in zip(rows, said, strict=True):
            if _is_number(one.get(name)):
                rest = json.dumps({k: v for k, v in one.items() if k != name}, sort_keys=True)
                groups.setdefault(rest, {})[one[name]] = row
        for group in groups.values():
            if len(group) >= FEWEST:
                label = next(iter(group.values())).name.partition(" (")[0]
                yield Sweep(name.rpartition(".")[2], label, sorted(group.items()))


def _said(result: Result) -> dict[str, Any]:
    """All settings, the method's own with their defaults."""
    said = full_settings(result)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd values were noted when the run was planned
        try:
            own = build_method(said["method"], said["adapt"], said["options"]).hyperparameters()
        except InputError:  # an old result of a method that is no more
            own = said["options"]
    return {k: v for k, v in said.items() if k not in ("options", "seed")} | own


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
