"""Results → rows of mean ± std over seeds → Markdown. A report never runs a model."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dosapp.result import Result

COLUMNS = {
    "accuracy": "Acc ↑",
    "forgetting": "F ↓",
    "first_task_accuracy": "FTA ↑",
    "current_task_accuracy": "CTA ↑",
}


@dataclass(frozen=True)
class Row:
    label: str
    data: str
    results: tuple[Result, ...]  # one per seed
    several: bool = False  # whether its table holds more than one dataset

    @property
    def name(self) -> str:
        return f"{self.label}, {self.data}" if self.several else self.label

    def values(self, metric: str) -> list[float]:
        found = [result.metrics.get(metric) for result in self.results]
        return [value for value in found if value is not None]

    def text(self, metric: str) -> str:
        values = self.values(metric)
        if not values:
            return "–"
        spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
        return f"{np.mean(values):.1f}{spread}"


def rows(results: Iterable[Result]) -> list[Row]:
    """One row per thing compared, its seeds together, in order of appearance.

    Runs that would share a name but not their settings are told apart by what differs.
    """
    groups: dict[str, dict[int, Result]] = {}
    for result in results:
        rest = {k: v for k, v in result.settings.items() if k != "seed"}
        group = groups.setdefault(json.dumps(rest, sort_keys=True), {})
        group[result.settings["seed"]] = result
    firsts = [next(iter(group.values())) for group in groups.values()]
    return [
        Row(
            first.label
            + _difference(
                first,
                [
                    f
                    for f in firsts
                    if f.label == first.label and f.stream["name"] == first.stream["name"]
                ],
            ),
            first.stream["name"],
            tuple(group[seed] for seed in sorted(group)),
            several=len({f.stream["name"] for f in firsts}) > 1,
        )
        for first, group in zip(firsts, groups.values(), strict=True)
    ]


def _difference(one: Result, namesakes: list[Result]) -> str:
    differ = [
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in one.settings.items()
        if key not in ("seed", "data", "options")
        and any(other.settings[key] != value for other in namesakes)
    ]
    return f" ({', '.join(differ)})" if differ else ""


def markdown(table: Sequence[Row], columns: dict[str, str] | None = None) -> str:
    columns = columns or COLUMNS
    head = ["method", *columns.values(), "seeds"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in table:
        cells = [row.name, *(row.text(metric) for metric in columns), str(len(row.results))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def footnote(columns: Iterable[str] = COLUMNS) -> str:
    """The definition behind every column: there is more than one 'forgetting'."""
    from dosapp.metrics import DEFINITIONS

    return "; ".join(f"{name} = {DEFINITIONS[name]}" for name in columns)
