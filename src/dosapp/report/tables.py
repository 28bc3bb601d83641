"""Results → rows of mean ± std over seeds → Markdown. A report never runs a model."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from dosapp.errors import InputError, unknown_name
from dosapp.experiments.plan import method_title
from dosapp.experiments.result import (
    Result,
    check_comparable,
    check_paired,
    check_same_definitions,
    full_settings,
)
from dosapp.methods.base import Ability
from dosapp.methods.registry import METHODS

COLUMNS = {
    "accuracy": "Acc ↑",
    "forgetting": "F ↓",
    "first_task_accuracy": "FTA ↑",
    "current_task_accuracy": "CTA ↑",
}


COSTS: Mapping[str, Callable[[Result], float | None]] = {
    "seconds": lambda result: sum(result.seconds["lessons"]) + sum(result.seconds["stream"]),
    "peak_memory": lambda result: result.peak_memory,
}
WITH_COSTS = {
    "accuracy": "Acc ↑",
    "forgetting": "F ↓",
    "seconds": "seconds",
    "peak_memory": "peak MB",
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

    @property
    def keeps_pictures(self) -> bool:
        """For replay, or because its adapter does."""
        said = self.results[0].settings
        kinds = (METHODS.get(said.get(half) or "") for half in ("method", "adapt"))
        return bool(said.get("memory")) or any(kind.stores_data for kind in kinds if kind)

    def values(self, metric: str) -> list[float]:
        cost = COSTS.get(metric)
        found = [cost(r) if cost else r.metrics.get(metric) for r in self.results]
        return [value for value in found if value is not None]

    def mean(self, metric: str) -> float | str:
        """Over seeds, or nothing."""
        values = self.values(metric)
        return float(np.mean(values)) if values else ""

    def text(self, metric: str) -> str:
        return _spread(self.values(metric), digits=0 if metric in COSTS else 1)


def rows(results: Iterable[Result]) -> list[Row]:
    """One row per thing compared, its seeds together, in order of appearance, set by set.

    Runs that would share a name but not their settings are told apart by what differs; those that
    share both, but not their key, saw other data or weights, and no table can hold the two.
    """
    results = list(results)
    sets = list(dict.fromkeys(result.stream["name"] for result in results))
    results.sort(key=lambda result: sets.index(result.stream["name"]))
    check_same_definitions(results)
    groups: dict[str, dict[int, Result]] = {}
    for result in results:
        rest = {k: v for k, v in full_settings(result).items() if k != "seed"}
        group = groups.setdefault(json.dumps(rest, sort_keys=True), {})
        other = group.setdefault(result.settings["seed"], result)
        if other.key != result.key:
            raise InputError(
                f"results {other.key} and {result.key} have the same settings and seed, but other "
                "data, weights or defaults; report one of them"
            )
    for name in sets:
        check_comparable([result for result in results if result.stream["name"] == name])
    firsts = [next(iter(group.values())) for group in groups.values()]
    return [
        Row(
            first.label
            + _difference(first, [f for f in firsts if f.stream["name"] == first.stream["name"]]),
            first.stream["name"],
            tuple(group[seed] for seed in sorted(group)),
            several=len(sets) > 1,
        )
        for first, group in zip(firsts, groups.values(), strict=True)
    ]


ASKED = ("test_noise", "full_test")  # what it was asked about, which names do not say


def _difference(one: Result, others: Sequence[Result]) -> str:
    """What tells a row from its namesakes, and how it was asked if others were asked otherwise."""
    namesakes = [other for other in others if other.label == one.label]
    differ = [
        _said(key, value)
        for key, value in full_settings(one).items()
        if key not in ("seed", "data", "options")
        and any(
            full_settings(f)[key] != value
            for f in (others if key in ASKED and value else namesakes)
        )
    ]
    differ = [words for words in differ if words]
    return f" ({', '.join(differ)})" if differ else ""


def _said(key: str, value: object) -> str:
    """`lr=0.1`; what is merely on or off is named when it is on."""
    if isinstance(value, bool):
        return key.replace("_", " ") if value else ""
    return f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"


def markdown(table: Sequence[Row], columns: Mapping[str, str] = COLUMNS) -> str:
    head = ["method", *columns.values(), "seeds"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in table:
        cells = [row.name, *(row.text(metric) for metric in columns), str(len(row.results))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def comma_separated(table: Sequence[Row], columns: Mapping[str, str] = COLUMNS) -> str:
    """Mean and deviation in columns of their own, unrounded, with what it takes to run it again."""
    text = io.StringIO()
    write = csv.writer(text, lineterminator="\n")
    head = [word for name in columns for word in (name, f"{name}_std")]
    write.writerow(["method", "data", *head, "seeds", "keys"])
    for row in table:
        cells: list[float | str] = []
        for name in columns:
            values = row.values(name)
            cells += [row.mean(name), float(np.std(values, ddof=1)) if len(values) > 1 else ""]
        keys = " ".join(result.key for result in row.results)
        write.writerow([row.name, row.data, *cells, len(row.results), keys])
    return text.getvalue()


LOWER_IS_BETTER = {"forgetting", "seconds", "peak_memory"}


def latex(table: Sequence[Row], columns: Mapping[str, str] = COLUMNS) -> str:
    """A booktabs table to paste, the best of each column on each dataset in bold."""
    means: dict[tuple[str, str], list[float]] = {}
    for row in table:
        for name in columns:
            if (mean := row.mean(name)) != "":
                means.setdefault((row.data, name), []).append(float(mean))
    best = {key: (min if key[1] in LOWER_IS_BETTER else max)(them) for key, them in means.items()}
    arrows = {"↑": r"$\uparrow$", "↓": r"$\downarrow$"}
    heads = [
        title.replace("↑", arrows["↑"]).replace("↓", arrows["↓"]) for title in columns.values()
    ]
    lines = [
        rf"\begin{{tabular}}{{l{'c' * len(columns)}}}",
        r"\toprule",
        " & ".join(["Method", *heads]) + r" \\",
        r"\midrule",
    ]
    for row in table:
        cells = [tex(row.name)]
        for name in columns:
            text = row.text(name).replace(" ± ", r" $\pm$ ").replace("–", "--")
            is_best = row.mean(name) == best.get((row.data, name))
            cells.append(rf"\textbf{{{text}}}" if is_best else text)
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def tex(name: str) -> str:
    special: dict[str, str | int | None] = {sign: f"\\{sign}" for sign in "%&_#${}"}
    special |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    parts = [part.translate(str.maketrans(special)) for part in name.split("D^u")]
    return "$D^u$".join(parts)


def paired(table: Sequence[Row], against: str) -> str:
    """Each row less the one named, seed by seed: what a difference is worth when seeds vary."""
    found = [row for row in table if row.name == against]
    if not found:
        raise unknown_name("row", against, [row.name for row in table])
    reference = {result.settings["seed"]: result for result in found[0].results}
    head = [f"difference to {against}", *COLUMNS.values(), "seeds"]
    lines = [head, ["---"] * len(head)]
    for row in table:
        both = [r for r in row.results if r.settings["seed"] in reference]
        if row.name == against or not both:
            continue
        for result in both:
            check_paired(result, reference[result.settings["seed"]])
        cells = []
        for metric in COLUMNS:
            pairs = [
                (r.metrics[metric], reference[r.settings["seed"]].metrics[metric]) for r in both
            ]
            cells.append(_spread([a - b for a, b in pairs if a is not None and b is not None], "+"))
        lines.append([row.name, *cells, str(len(both))])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


STREAM = ("labels right", "experts differ", "distance", "control kept")


def on_the_stream(table: Sequence[Row]) -> str:
    """What the stream was like for those who used it; means over sessions, spread over seeds."""
    lines = [["method", *STREAM, "seeds"], ["---"] * (len(STREAM) + 2)]
    for row in table:
        if not any(share is not None for r in row.results for share in r.pseudo_labels):
            continue
        per_seed = [
            (
                _mean(r.pseudo_labels),
                _mean(r.disagreement),
                _mean(r.distance["stream"]),
                r.metrics["control_kept"],
            )
            for r in row.results
        ]
        cells = [
            _spread([v for v in values if v is not None]) for values in zip(*per_seed, strict=True)
        ]
        lines.append([row.name, *cells, str(len(row.results))])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _mean(values: Iterable[float | None]) -> float | None:
    """Of what was measured; nothing if nothing was."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _spread(values: list[float], sign: str = "", digits: int | None = None) -> str:
    if not values:
        return "–"
    if digits is None:  # small numbers need one more
        digits = 1 if abs(np.mean(values)) >= 1 or sign else 2
    text = f"{np.mean(values):{sign}.{digits}f}"
    return text + (f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else "")


def abilities() -> str:
    """The paper's comparison of methods that adapt, from the registry."""
    columns = get_args(Ability)
    lines = [["method", *columns], ["---"] * (len(columns) + 1)]
    for name, kind in METHODS.items():
        if kind.abilities is not None:
            lines.append(
                [method_title(name), *("yes" if c in kind.abilities else "–" for c in columns)]
            )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def footnote(results: Iterable[Result], columns: Iterable[str] = COLUMNS) -> str:
    """The definition behind every column, as the results have it: there is more than one
    'forgetting'."""
    said = {name: formula for r in results for name, formula in r.definitions.items()}
    return "; ".join(f"{name} = {said[name]}" for name in columns if name in said)
