"""Figures of results, in colours that can be told apart in print and by colour-blind readers."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dosapp.report.stream_gain import StreamGain
from dosapp.report.sweeps import find_sweeps
from dosapp.report.tables import BOUNDS, Row

Values = NDArray[np.float64]

# The palette of Okabe and Ito. Rows that most figures show have a fixed colour.
PALETTE = ["#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#8c6d31", "#7b4173", "#bdbd22"]
OURS, TUNED, BOUND, OTHER = "#0072B2", "#D55E00", "#6b6b6b", "#404040"
FIXED_COLOURS = {"DoSAPP": OURS, "FLYP": TUNED, **dict.fromkeys(BOUNDS, BOUND)}
SYMBOLS = {"gamma": "γ", "lam": "λ", "delta": "δ", "sparsity": "trainable share of candidates, c"}
MARKERS = ("o", "s", "^", "D", "v", "P")  # one per dataset
MIN_GAINS = 3  # points of a figure
MAX_LINES = 14  # more rows than this are drawn as a table of colours or a ranking
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "svg.hashsalt": "dosapp",
}


def assign_colours(rows: Sequence[Row]) -> dict[str, str]:
    """A colour for each row name; with many rows, one for DoSAPP and one for all others."""
    if len(rows) > MAX_LINES:
        return {row.name: OURS if row.label.startswith("DoSAPP") else OTHER for row in rows}
    others = [row.name for row in rows if row.label not in FIXED_COLOURS]
    free = {name: PALETTE[n % len(PALETTE)] for n, name in enumerate(others)}
    return {row.name: FIXED_COLOURS.get(row.label, free.get(row.name, BOUND)) for row in rows}


def row_title(row: Row) -> str:
    """The name of a row, with formulas for matplotlib."""
    return row.name.replace("D^u", "$D^u$")


SEEN_ACCURACY = "accuracy on the tasks seen so far, %"
FINAL_ACCURACY = "final accuracy, %"
FORGETTING = "forgetting, points"


def _seen_accuracy(row: Row) -> Values:
    """Mean accuracy over the tasks seen so far, seeds × sessions."""
    return np.array([np.nanmean(r.matrix, axis=1) for r in row.results])


def plot_accuracy(rows: Sequence[Row], colour_of: Mapping[str, str]) -> Figure:
    """Mean accuracy over the tasks seen so far after every session; bands are over seeds."""
    if len(rows) > MAX_LINES:
        return _heat_table(rows, [_seen_accuracy(row).mean(axis=0) for row in rows], SEEN_ACCURACY)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
        rounds = {row.name: n // len(PALETTE) for n, row in enumerate(rows)}  # colours repeat
        sessions = max(len(row.results[0].R) for row in rows)
        dashes = {name: ["-", "--", "-.", ":"][n % 4] for name, n in rounds.items()}
        for row in rows:
            lines = _seen_accuracy(row)
            colour, ours = colour_of[row.name], row.label == "DoSAPP"
            if lines.shape[1] == 1:  # joint training has one session; drawn at the last
                axes.plot(sessions, lines.mean(), "D", ms=6, color=colour, label=row_title(row))
                continue
            x, mean = np.arange(1, lines.shape[1] + 1), lines.mean(axis=0)
            look = {"lw": 2.5, "zorder": 3} if ours else {"lw": 1.4, "ls": dashes[row.name]}
            axes.plot(x, mean, marker="o", ms=4, color=colour, label=row_title(row), **look)
            if len(lines) > 1:
                spread = lines.std(axis=0, ddof=1)
                low, high = np.maximum(mean - spread, 0), np.minimum(mean + spread, 100)
                axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
        axes.set(xlabel="session", ylabel=SEEN_ACCURACY)
        axes.xaxis.get_major_locator().set_params(integer=True)
        _legend(axes, rows)
    return figure


def plot_forgetting_maps(rows: Sequence[Row]) -> Figure:
    """F[t, i] = R[i, i] - R[t, i], mean over seeds; blue: negative, the accuracy increased."""
    rows = [row for row in rows if len(row.results[0].R) > 1]
    many = len(rows) > MAX_LINES
    across, side = min(6 if many else 3, len(rows)), 2.0 if many else 3.0
    down = -(-len(rows) // across)
    with plt.rc_context(STYLE | {"axes.grid": False}):
        figure, grid = plt.subplots(
            down,
            across,
            figsize=(1.04 * side * across, side * down),
            layout="constrained",
            squeeze=False,
        )
        maps = [
            np.mean([np.array(r.forgetting_matrix, dtype=float)[1:, :-1] for r in row.results], 0)
            for row in rows
        ]
        limit = max(float(np.nanmax(np.abs(values))) for values in maps)
        for axes in grid.flat[len(rows) :]:
            axes.set_axis_off()
        for axes, row, values in zip(grid.flat, rows, maps, strict=False):
            image = axes.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit)
            size = len(values)
            axes.set(title=row_title(row), xlabel="task", ylabel="after session")
            step = max(1, size // 5)
            axes.set_xticks(range(0, size, step), range(1, size + 1, step))
            axes.set_yticks(range(0, size, step), range(2, size + 2, step))
            for boundary in row.results[0].stream["boundaries"]:
                axes.axvline(boundary - 0.5, color="black", lw=1)
                axes.axhline(boundary - 1.5, color="black", lw=1)
        figure.colorbar(image, ax=list(grid.flat), label=FORGETTING, shrink=min(0.8, 2 / down))
    return figure


def plot_before_after(rows: Sequence[Row], colour_of: Mapping[str, str]) -> Figure | None:
    """Accuracy on the tasks before the current one, before and after the unlabelled stream."""
    rows = [
        row
        for row in rows
        if row.results[0].previous_tasks["before"] != row.results[0].previous_tasks["after"]
    ]
    if not rows:
        return None
    if len(rows) > MAX_LINES // 2:  # two lines per row
        gains = [_earlier_accuracy(row, "after") - _earlier_accuracy(row, "before") for row in rows]
        return _heat_table(
            rows, gains, "accuracy on earlier tasks, change over the stream in points", signed=True
        )
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
        for row in rows:
            for when, style in (("before", "--"), ("after", "-")):
                mean = _earlier_accuracy(row, when)
                x, label = np.arange(1, len(mean) + 1), f"{row_title(row)}, {when}"
                axes.plot(x, mean, style, color=colour_of[row.name], label=label)
        axes.set(xlabel="session", ylabel="accuracy on earlier tasks, %")
        axes.xaxis.get_major_locator().set_params(integer=True)
        _legend(axes, rows)
    return figure


def _earlier_accuracy(row: Row, when: str) -> Values:
    """Accuracy on the tasks before each session, mean over seeds."""
    return np.mean([np.array(r.previous_tasks[when], dtype=float) for r in row.results], axis=0)


def _heat_table(
    rows: Sequence[Row], lines: Sequence[Values], head: str, signed: bool = False
) -> Figure:
    """A table of coloured numbers, rows × sessions, sorted by the last session.

    It replaces a plot of more lines than a reader can tell apart. A row of one session (joint
    training) is shown at the last session.
    """
    sessions = max(map(len, lines))
    order = sorted(range(len(rows)), key=lambda n: -np.nan_to_num(lines[n][-1]))
    values = np.full((len(rows), sessions), np.nan)
    for y, n in enumerate(order):
        values[y, -len(lines[n]) :] = lines[n]
    limit = float(np.nanmax(np.abs(values)))
    colours = {"vmin": -limit, "vmax": limit, "cmap": "RdBu"} if signed else {"cmap": "Blues"}
    with plt.rc_context(STYLE | {"axes.grid": False}):
        size = (max(3.6, 2.0 + 0.52 * sessions), 1 + 0.2 * len(rows))
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        image = axes.imshow(values, aspect="auto", **colours)
        for (y, x), value in np.ndenumerate(values):
            if np.isfinite(value):
                shade = image.norm(value)
                dark = abs(shade - 0.5) > 0.3 if signed else shade > 0.6
                ink = "white" if dark else "black"
                text = f"{value:+.1f}" if signed else f"{value:.1f}"
                axes.text(x, y, text, ha="center", va="center", size=6, color=ink)
        axes.set_xticks(range(sessions), range(1, sessions + 1), size=8)
        axes.set_yticks(range(len(rows)), [row_title(rows[n]) for n in order], size=7)
        for tick, n in zip(axes.get_yticklabels(), order, strict=True):
            tick.set_color(OURS if rows[n].label.startswith("DoSAPP") else OTHER)
        axes.set_xlabel("session")
        axes.set_title(head, size=9, loc="left")
    return figure


def plot_accuracy_forgetting(rows: Sequence[Row], colour_of: Mapping[str, str]) -> Figure | None:
    """Final accuracy against forgetting; the best corner is the upper left."""
    bounds = [row for row in rows if row.label in BOUNDS]
    rows = [row for row in rows if row.values("forgetting") and row.label not in BOUNDS]
    if len(rows) < 2:
        return None
    if len(rows) > MAX_LINES:
        return _plot_ranking(rows, bounds, colour_of)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 5.4), layout="constrained")
        points = []
        for row in rows:
            x, y = (np.array(row.values(name)) for name in ("forgetting", "accuracy"))
            spread = {"xerr": x.std(ddof=1), "yerr": y.std(ddof=1)} if len(x) > 1 else {}
            colour = colour_of[row.name]
            axes.errorbar(x.mean(), y.mean(), fmt="o", color=colour, elinewidth=0.6, **spread)
            points.append((float(x.mean()), float(y.mean()), row_title(row)))
        axes.set(xlabel=FORGETTING, ylabel=FINAL_ACCURACY)
        figure.draw_without_rendering()  # fixes the positions of the points on the page
        taken: list[tuple[float, float]] = []
        for left, high, name in sorted(points, key=lambda point: -point[1]):
            across, up = axes.transData.transform((left, high)) * 72 / figure.dpi
            shift = 3.0
            while any(abs(across - a) < 70 and abs(up + shift - u) < 7.5 for a, u in taken):
                shift -= 7.5  # a label that would cover another is moved below it
            taken.append((across, up + shift))
            line = {"arrowstyle": "-", "lw": 0.3, "color": "#888"} if shift < -5 else None
            axes.annotate(
                name,
                (left, high),
                xytext=(6, shift),
                textcoords="offset points",
                size=7,
                arrowprops=line,
            )
    return figure


def _plot_ranking(
    rows: Sequence[Row], bounds: Sequence[Row], colour_of: Mapping[str, str]
) -> Figure:
    """Final accuracy and forgetting of many rows, sorted by accuracy.

    Hollow: the row stores images. Dotted: zero-shot and joint training.
    """
    rows = sorted(rows, key=lambda row: float(np.mean(row.values("accuracy"))))
    with plt.rc_context(STYLE):
        figure, pair = plt.subplots(
            1, 2, figsize=(7.2, 1.2 + 0.2 * len(rows)), layout="constrained", sharey=True
        )
        heads = {"accuracy": FINAL_ACCURACY, "forgetting": FORGETTING}
        for axes, (metric, head) in zip(pair, heads.items(), strict=True):
            for n, row in enumerate(rows):
                x = np.array(row.values(metric))
                spread = {"xerr": x.std(ddof=1)} if len(x) > 1 else {}
                fill = {"mfc": "white"} if row.stores_images else {}
                axes.errorbar(x.mean(), n, fmt="o", ms=4, color=colour_of[row.name], elinewidth=0.8,
                              **spread, **fill)  # fmt: skip
            axes.set(xlabel=head)
        for bound in bounds:
            level = float(np.mean(bound.values("accuracy")))
            pair[0].axvline(level, color=BOUND, ls=":", lw=1)
            pair[0].annotate(bound.label, (level, 1), xycoords=("data", "axes fraction"),
                             xytext=(0, 3), textcoords="offset points",
                             ha="center", size=7, color=BOUND)  # fmt: skip
        look = {"marker": "o", "ls": "", "ms": 4, "color": OTHER}
        hollow = pair[1].plot([], [], mfc="white", label="stores images", **look)
        if any(row.stores_images for row in rows):
            above = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderpad": 0}
            pair[1].legend(handles=hollow, frameon=False, fontsize=7, **above)
        pair[0].set_ylim(-0.7, len(rows) - 0.3)
        pair[0].set_yticks(range(len(rows)), [row_title(row) for row in rows], size=7)
    return figure


def plot_pseudo_labels(rows: Sequence[Row], colour_of: Mapping[str, str]) -> Figure | None:
    """Accuracy of the pseudo-labels in every session."""
    rows = [row for row in rows if any(x is not None for x in row.results[0].pseudo_labels)]
    if not rows:
        return None
    seeds = [np.array([r.pseudo_labels for r in row.results], dtype=float) for row in rows]
    # A confidence gate may hold back all images of a session.
    means = [np.ma.masked_invalid(lines).mean(axis=0).filled(np.nan) for lines in seeds]
    head = "correct pseudo-labels, %"
    if len(rows) > MAX_LINES // 2:  # the lines are close together
        return _heat_table(rows, means, head)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
        for row, mean in zip(rows, means, strict=True):
            x = np.arange(1, len(mean) + 1)
            axes.plot(x, mean, "o-", ms=4, color=colour_of[row.name], label=row_title(row))
        axes.set(xlabel="session", ylabel=head)
        axes.xaxis.get_major_locator().set_params(integer=True)
        _legend(axes, rows)
    return figure


def plot_costs(rows: Sequence[Row], colour_of: Mapping[str, str]) -> Figure | None:
    """Seconds and peak memory of each run."""
    if not any(row.values("peak_memory") for row in rows):
        return None
    with plt.rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure, pair = plt.subplots(
            1, 2, figsize=(7.2, 1 + 0.24 * len(rows)), layout="constrained", sharey=True
        )
        names = [row_title(row) for row in rows]
        for axes, metric, head in zip(
            pair, ("seconds", "peak_memory"), ("seconds of training", "peak MB"), strict=True
        ):
            values = [float(row.mean(metric) or 0) for row in rows]
            axes.barh(names, values, color=[colour_of[row.name] for row in rows])
            axes.set(xlabel=head)
        pair[0].margins(y=0.01)
        pair[0].invert_yaxis()
        pair[0].tick_params(axis="y", labelsize=8)
    return figure


def _legend(axes: Any, rows: Sequence[Row]) -> None:
    small = {"fontsize": 9 if len(rows) < 12 else 6.5, "ncols": 1 + len(rows) // 24}
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), **small)


def plot_sweeps(rows: Sequence[Row]) -> Figure | None:
    """Accuracy and forgetting over every setting that alone varies."""
    sweeps = list(find_sweeps(rows))
    if not sweeps:
        return None
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            len(sweeps), 2, figsize=(7.2, 2.3 * len(sweeps)), layout="constrained", squeeze=False
        )
        heads = {"accuracy": FINAL_ACCURACY, "forgetting": FORGETTING}
        for pair, sweep in zip(grid, sweeps, strict=True):
            x = [value for value, _ in sweep.points]
            for axes, (metric, head) in zip(pair, heads.items(), strict=True):
                values = [np.array(row.values(metric)) for _, row in sweep.points]
                spread = [v.std(ddof=1) if len(v) > 1 else 0.0 for v in values]
                means = [v.mean() if len(v) else np.nan for v in values]
                axes.errorbar(x, means, yerr=spread, fmt="o-", ms=4, color=OURS, elinewidth=0.8)
                axes.set(xlabel=SYMBOLS.get(sweep.setting, sweep.setting), ylabel=head)
                if min(x) > 0 and max(x) / min(x) > 20:
                    axes.set_xscale("log")
                    axes.set_xticks(x, [f"{value:g}" for value in x])
                    axes.minorticks_off()
            pair[0].set_title(sweep.label, size=9, loc="left")
    return figure


def plot_stream_gains(gains: Sequence[StreamGain]) -> Figure | None:
    """Gain of the stream in accuracy against correct pseudo-labels, one point per run."""
    if len(gains) < MIN_GAINS:
        return None
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
        axes.axhline(0, color=OTHER, lw=0.8)
        data = list(dict.fromkeys(gain.data for gain in gains))
        for n, name in enumerate(data):
            for is_ours in (False, True):
                points = [g for g in gains if g.data == name and is_ours == (g.label == "DoSAPP")]
                axes.plot(
                    [g.correct for g in points],
                    [g.accuracy for g in points],
                    MARKERS[n % len(MARKERS)],
                    ms=7 if is_ours else 5,
                    color=OURS if is_ours else PALETTE[n % len(PALETTE)],
                    alpha=0.9 if is_ours else 0.7,
                    label=f"{name}: {'DoSAPP' if is_ours else 'others'}" if points else None,
                )
        axes.set(xlabel="correct pseudo-labels after the first session, %")
        axes.set(ylabel="gain of the stream in final accuracy, points")
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    return figure


def draw_figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Draw every figure that the rows have data for.

    Args:
        rows: Rows of one dataset.

    Returns:
        File names without suffix → figures.
    """
    colour_of = assign_colours(rows)  # the same in every figure
    drawn = {"accuracy": plot_accuracy(rows, colour_of)}
    if any(len(row.results[0].R) > 1 for row in rows):
        drawn["forgetting"] = plot_forgetting_maps(rows)
    optional = {
        "stream": plot_before_after(rows, colour_of),
        "plane": plot_accuracy_forgetting(rows, colour_of),
        "labels": plot_pseudo_labels(rows, colour_of),
        "sweeps": plot_sweeps(rows),
        "costs": plot_costs(rows, colour_of),
    }
    return drawn | {name: figure for name, figure in optional.items() if figure is not None}


def plot_benchmark(seconds: Mapping[str, Any]) -> Figure:
    """Median times of the benchmark's implementations as multiples of ours."""
    with plt.rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure, axes = plt.subplots(figsize=(7.2, 0.8 + 0.6 * len(seconds)), layout="constrained")
        colour_of = {"ours": OURS, "plain": TUNED, "bare": BOUND}
        for n, times in enumerate(seconds.values()):
            shown = {name: times[name] for name in colour_of if name in times}
            for bar, (name, time) in enumerate(shown.items()):
                length = time["median"] / times["ours"]["median"]
                axes.barh(n + 0.27 * (bar - 1), length, 0.25, color=colour_of[name],
                          xerr=time["spread"] * length,
                          label=name if n == 0 else None)  # fmt: skip
        names = [name.replace("_", " ") for name in seconds]
        axes.set_yticks(range(len(names)), names, size=8)
        axes.invert_yaxis()
        axes.set(xlabel="time, as a multiple of ours")
        axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def plot_scaling(scaling: Mapping[str, Any]) -> Figure:
    """Step time and memory over classes, batch size and tasks, with the fitted lines."""
    heads = {
        "classes": ("classes", "step, s"),
        "batch": ("batch", "step, s"),
        "tasks": ("tasks seen", "step ÷ bare forward"),
        "bytes": ("tasks seen", "extra memory, MB"),
    }
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(2, 2, figsize=(7.2, 5.0), layout="constrained")
        for axes, (name, (across, up)) in zip(grid.flat, heads.items(), strict=True):
            fit, factor = scaling[name], 1e-6 if name == "bytes" else 1.0
            x, y = np.array(fit["x"], dtype=float), factor * np.array(fit["y"])
            axes.plot(x, y, "o", ms=4, color=OURS)
            axes.plot(x, factor * (fit["start"] + fit["slope"] * x), lw=1, color=BOUND)
            axes.set(xlabel=across, ylabel=up, ylim=(0, 1.15 * y.max()))
    return figure


def save_figure(
    figure: Figure, folder: Path, name: str, suffixes: Sequence[str] = ("png", "svg", "pdf")
) -> None:
    """Write a figure to `folder/name.suffix`, reproducibly, in every format."""
    for suffix in suffixes:
        figure.savefig(
            folder / f"{name}.{suffix}",
            dpi=150,
            metadata={"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix),
        )


def to_svg(figure: Figure) -> str:
    """The figure as an `<svg>` element for an HTML page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
