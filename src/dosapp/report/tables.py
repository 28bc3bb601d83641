"""Tables of results: one row per configuration, mean ± standard deviation over seeds."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from dosapp.errors import InputError, unknown_name
from dosapp.experiments.identity import comparable_settings, method_title, run_label
from dosapp.experiments.result import (
    Result,
    check_comparable,
    check_paired,
    check_same_definitions,
    class_order,
    full_settings,
)
from dosapp.methods.base import Ability
from dosapp.methods.registry import METHODS
from dosapp.settings import RunSettings

COLUMNS = {
    "accuracy": "Acc ↑",
    "forgetting": "F ↓",
    "first_task_accuracy": "FTA ↑",
    "current_task_accuracy": "CTA ↑",
}
BOUNDS = ("zero-shot", "Joint")  # no training, and training on all tasks at once
MEANINGS = {
    "accuracy": "accuracy at the end, mean over all tasks",
    "forgetting": "what earlier tasks lost from their best accuracy to the end",
    "first_task_accuracy": "accuracy on the first task at the end",
    "current_task_accuracy": "accuracy on the current, newest task at the end",
    "zero_shot_accuracy": "accuracy of the pretrained backbone, on all tasks",
    "seconds": "time of training in both phases",
    "peak_memory": "peak memory of the process",
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
LOWER_IS_BETTER = {"forgetting", "seconds", "peak_memory"}
# Settings of the evaluation, which a label does not show.
EVALUATION_SETTINGS = ("test_noise", "full_test")


@dataclass(frozen=True)
class Row:
    """The results of one configuration on one dataset, one per seed."""

    label: str
    data: str
    results: tuple[Result, ...]  # sorted by seed
    show_data: bool = False  # whether the table has more than one dataset

    @property
    def name(self) -> str:
        """The label, with the dataset if the table has several."""
        return f"{self.label}, {self.data}" if self.show_data else self.label

    @property
    def stores_images(self) -> bool:
        """Whether images are stored, in a replay buffer or by the method itself."""
        settings = full_settings(self.results[0])
        methods = (METHODS.get(settings[phase] or "") for phase in ("method", "adapt"))
        return bool(settings["buffer_size"]) or any(m.stores_data for m in methods if m)

    def values(self, metric: str) -> list[float]:
        """A metric or cost of each seed; seeds without a value are left out."""
        cost = COSTS.get(metric)
        values = [cost(r) if cost else r.metrics.get(metric) for r in self.results]
        return [value for value in values if value is not None]

    def mean(self, metric: str) -> float | str:
        """The mean over seeds; an empty string if there is no value."""
        values = self.values(metric)
        return float(np.mean(values)) if values else ""

    def text(self, metric: str) -> str:
        """`mean ± std` over seeds, as tables print it."""
        return format_mean_std(self.values(metric), digits=0 if metric in COSTS else 1)


def build_rows(results: Iterable[Result]) -> list[Row]:
    """Group results into rows, dataset by dataset, in order of appearance.

    A row holds the seeds of the same settings, apart from those that do not enter a result's key
    (device, data folder, …). A key that occurs twice is one result. Rows with the same label get
    the settings in which they differ appended.

    Args:
        results: Results of any number of runs and datasets.

    Returns:
        The rows.

    Raises:
        InputError: Results cannot stand in one table: other definitions of a metric, tasks, images
            or backbones, or the same settings and seed with different keys.
    """
    unique: dict[str, Result] = {}
    for result in results:
        unique.setdefault(result.key, result)
    results = list(unique.values())
    datasets = list(dict.fromkeys(result.stream["name"] for result in results))
    results.sort(key=lambda result: datasets.index(result.stream["name"]))
    check_same_definitions(results)
    groups: dict[str, tuple[dict[str, Any], dict[int, Result]]] = {}
    for result in results:
        settings = comparable_settings(result.settings)
        _, group = groups.setdefault(json.dumps(settings, sort_keys=True), (settings, {}))
        other = group.setdefault(result.settings["seed"], result)
        if other is not result:
            raise InputError(
                f"results {other.source} and {result.source} have the same settings and seed, but "
                "other data, weights or defaults; report one of them"
            )
    for name in datasets:
        check_comparable([result for result in results if result.stream["name"] == name])
    rows = []
    for settings, group in groups.values():
        seeds = tuple(group[seed] for seed in sorted(group))
        label, name = row_label(seeds[0], settings), seeds[0].stream["name"]
        rows.append((Row(label, name, seeds, show_data=len(datasets) > 1), settings))
    return [replace(row, label=row.label + _difference(row, values, rows)) for row, values in rows]


def row_label(result: Result, settings: Mapping[str, Any]) -> str:
    """The label by today's names; the stored one if the method or a setting no longer exists."""
    try:
        return run_label(RunSettings.parse(settings))
    except InputError:
        return result.label


def _difference(
    row: Row, settings: Mapping[str, Any], rows: Sequence[tuple[Row, Mapping[str, Any]]]
) -> str:
    """The settings that distinguish a row from those with the same label, in parentheses.

    Settings of the evaluation are shown wherever any other row differs.
    """
    others = [(other, values) for other, values in rows if other.data == row.data]
    same_label = [(other, values) for other, values in others if other.label == row.label]
    differences = [
        _format_setting(key, value)
        for key, value in settings.items()
        if key not in ("data", "options")
        and any(
            values[key] != value
            for _, values in (others if key in EVALUATION_SETTINGS and value else same_label)
        )
    ]
    differences = [text for text in differences if text]
    return f" ({', '.join(differences)})" if differences else ""


def _format_setting(key: str, value: object) -> str:
    """`lr=0.1`; a switch is named if it is not as usual."""
    if isinstance(value, bool):
        name = key.replace("_", " ")
        usual = RunSettings.model_fields[key].default if key in RunSettings.model_fields else False
        return "" if value == usual else name if value else f"no {name}"
    return f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"


def to_markdown(table: Sequence[Row], columns: Mapping[str, str] = COLUMNS) -> str:
    """A table in Markdown.

    Args:
        table: The rows.
        columns: Metrics and costs → column titles.
    """
    head = ["method", *columns.values(), "seeds"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in table:
        cells = [row.name, *(row.text(metric) for metric in columns), str(len(row.results))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def to_csv(table: Sequence[Row], columns: Mapping[str, str] = COLUMNS) -> str:
    """A table in CSV: unrounded means, standard deviations, and the keys of the results."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = [title for name in columns for title in (name, f"{name}_std")]
    writer.writerow(["method", "data", *head, "seeds", "keys"])
    for row in table:
        cells: list[float | str] = []
        for name in columns:
            values = row.values(name)
            cells += [row.mean(name), float(np.std(values, ddof=1)) if len(values) > 1 else ""]
        keys = " ".join(result.key for result in row.results)
        writer.writerow([row.name, row.data, *cells, len(row.results), keys])
    return text.getvalue()


def find_best(
    table: Sequence[Row], columns: Iterable[str] = COLUMNS
) -> dict[tuple[str, str], float]:
    """The best mean of each dataset and column, leaving out zero-shot and joint training.

    Args:
        table: The rows.
        columns: Metrics and costs.

    Returns:
        (data, metric) → the mean.
    """
    means: dict[tuple[str, str], list[float]] = {}
    for row in table:
        for name in columns:
            if row.label not in BOUNDS and (mean := row.mean(name)) != "":
                means.setdefault((row.data, name), []).append(float(mean))
    return {key: (min if key[1] in LOWER_IS_BETTER else max)(v) for key, v in means.items()}


def to_latex(table: Sequence[Row], columns: Mapping[str, str] = COLUMNS) -> str:
    """A booktabs table in LaTeX, the best value of each column and dataset in bold."""
    best = find_best(table, columns)
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
        cells = [escape_latex(row.name)]
        for name in columns:
            text = row.text(name).replace(" ± ", r" $\pm$ ").replace("–", "--")
            is_best = row.mean(name) == best.get((row.data, name))
            cells.append(rf"\textbf{{{text}}}" if is_best else text)
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def escape_latex(name: str) -> str:
    """Escape the special characters of LaTeX; `D^u` becomes a formula."""
    special: dict[str, str | int | None] = {sign: f"\\{sign}" for sign in "%&_#${}"}
    special |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    parts = [part.translate(str.maketrans(special)) for part in name.split("D^u")]
    return "$D^u$".join(parts)


def paired_differences(table: Sequence[Row], against: str) -> str:
    """A Markdown table of each row minus a reference row, paired by seed.

    Args:
        table: The rows.
        against: Name of the reference row.

    Returns:
        Mean ± standard deviation of the paired differences.

    Raises:
        InputError: There is no such row, or two results are not evaluated on the same images.
    """
    matches = [row for row in table if row.name == against]
    if not matches:
        raise unknown_name("row", against, [row.name for row in table])
    reference = {result.settings["seed"]: result for result in matches[0].results}
    head = [f"difference to {against}", *COLUMNS.values(), "seeds"]
    lines = [head, ["---"] * len(head)]
    for row in table:
        pairs = [
            (r, reference[r.settings["seed"]])
            for r in row.results
            if r.settings["seed"] in reference
        ]
        same_order = class_order(row.results[0]) == class_order(matches[0].results[0])
        if row.name == against or not pairs or not same_order:
            continue
        for result, other in pairs:
            check_paired(result, other)
        cells = []
        for metric in COLUMNS:
            values = [(r.metrics[metric], other.metrics[metric]) for r, other in pairs]
            differences = [a - b for a, b in values if a is not None and b is not None]
            cells.append(format_mean_std(differences, "+"))
        lines.append([row.name, *cells, str(len(pairs))])
    return markdown_lines(lines)


STREAM_COLUMNS = ("correct pseudo-labels", "expert disagreement", "distance", "control kept")


def stream_statistics(table: Sequence[Row]) -> str:
    """A Markdown table of the unlabelled phase: means over sessions, then over seeds.

    Rows without pseudo-labels are left out.
    """
    lines = [["method", *STREAM_COLUMNS, "seeds"], ["---"] * (len(STREAM_COLUMNS) + 2)]
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
        columns = zip(*per_seed, strict=True)
        cells = [format_mean_std([v for v in values if v is not None]) for values in columns]
        lines.append([row.name, *cells, str(len(row.results))])
    return markdown_lines(lines)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def format_mean_std(values: list[float], sign: str = "", digits: int | None = None) -> str:
    """`mean ± std`, or a dash without values; `sign` is "+" for differences."""
    if not values:
        return "–"
    if digits is None:  # small numbers get one digit more
        digits = 1 if abs(np.mean(values)) >= 1 or sign else 2
    text = f"{np.mean(values):{sign}.{digits}f}"
    return text + (f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else "")


def abilities_table() -> str:
    """The paper's comparison of test-time methods (its Table 1) in Markdown."""
    columns = get_args(Ability)
    lines = [["method", *columns], ["---"] * (len(columns) + 1)]
    for name, method in METHODS.items():
        if method.abilities is not None:
            cells = ("yes" if column in method.abilities else "–" for column in columns)
            lines.append([method_title(name), *cells])
    return markdown_lines(lines)


def metric_definitions(results: Iterable[Result], columns: Iterable[str] = COLUMNS) -> str:
    """The formulas of a table's columns, as the results state them."""
    formulas = {name: formula for r in results for name, formula in r.definitions.items()}
    return "; ".join(f"{name} = {formulas[name]}" for name in columns if name in formulas)


def markdown_lines(lines: Iterable[Sequence[str]]) -> str:
    """Lines of cells as a Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
