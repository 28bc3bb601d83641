"""Find sweeps: rows that differ in one numeric setting or hyper-parameter."""

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dosapp.errors import InputError
from dosapp.experiments.identity import comparable_settings
from dosapp.experiments.result import Result
from dosapp.methods.registry import build_method
from dosapp.report.tables import Row
from dosapp.settings import list_stages

MIN_POINTS = 3


@dataclass(frozen=True)
class Sweep:
    """Rows that differ in one number only."""

    setting: str
    label: str
    points: Sequence[tuple[float, Row]]  # sorted by value


def find_sweeps(rows: Sequence[Row]) -> Iterator[Sweep]:
    """Yield every setting that has three values or more while all others are equal.

    The learning rate is not swept: methods have their own.
    """
    settings = [_all_settings(row.results[0]) for row in rows]
    names = {n for values in settings for n, value in values.items() if _is_number(value)}
    for name in sorted(names - {"lr", "class_order_seed"}):
        groups: dict[str, dict[float, Row]] = {}
        for row, values in zip(rows, settings, strict=True):
            if _is_number(values.get(name)):
                rest = json.dumps({k: v for k, v in values.items() if k != name}, sort_keys=True)
                groups.setdefault(rest, {})[values[name]] = row
        for group in groups.values():
            if len(group) >= MIN_POINTS:
                label = next(iter(group.values())).name.partition(" (")[0]
                yield Sweep(name.rpartition(".")[2], label, sorted(group.items()))


def _all_settings(result: Result) -> dict[str, Any]:
    """The settings, with all hyper-parameters of the method in place of its options."""
    settings = comparable_settings(result.settings)
    options = settings.pop("options")
    return settings | (result.hyperparameters or _resolve(settings, options))


def _resolve(settings: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a result of version 0.1, which stored only the options."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unusual values were reported when the run was planned
        stages = list_stages(settings["merging"], settings["align"])
        try:
            method = build_method(settings["method"], settings["adapt"], options, stages)
        except InputError:  # a method that no longer exists
            return options
    return method.hyperparameters()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
