"""Results → pictures, in colours that survive print and colour blindness."""

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

from dosapp.report.sweeps import sweeps
from dosapp.report.tables import Row

Values = NDArray[np.float64]

# Okabe and Ito's palette. What every figure shows keeps its colour in all of them.
PALETTE = ["#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#8c6d31", "#7b4173", "#bdbd22"]
OURS, TUNED, BOUND, OTHER = "#0072B2", "#D55E00", "#6b6b6b", "#404040"
BOUNDS = ("zero-shot", "Joint")  # learning nothing, and all at once
KNOWN = {"DoSAPP": OURS, "FLYP": TUNED, **dict.fromkeys(BOUNDS, BOUND)}
SYMBOLS = {"gamma": "γ", "lam": "λ", "delta": "δ", "sparsity": "share of candidates that move, c"}
LEGIBLE = 14  # rows that lines and names in one picture can tell apart
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "svg.hashsalt": "dosapp",
}


def colours(rows: Sequence[Row]) -> dict[str, str]:
    """A colour each, as long as they can be told apart; then ours, and the others."""
    if len(rows) > LEGIBLE:
        return {row.name: OURS if row.label.startswith("DoSAPP") else OTHER for row in rows}
    others = [row.name for row in rows if row.label not in KNOWN]
    free = {name: PALETTE[n % len(PALETTE)] for n, name in enumerate(others)}
    return {row.name: KNOWN.get(row.label, free.get(row.name, BOUND)) for row in rows}


def title(row: Row) -> str:
    return row.name.replace("D^u", "$D^u$")


SO_FAR = "accuracy on the tasks seen so far, %"


def _known(row: Row) -> Values:
    """Seeds × sessions: mean accuracy over the tasks seen so far."""
    return np.array([np.nanmean(r.matrix, axis=1) for r in row.results])


def curves(rows: Sequence[Row], colour_of: Mapping[str, str]) -> Figure:
    """Mean accuracy over the tasks seen so far, after every session, with a band over seeds."""
    if len(rows) > LEGIBLE:
        return _sheet(rows, [_known(row).mean(axis=0) for row in rows], SO_FAR)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
        rounds = {row.name: n // len(PALETTE) for n, row in enumerate(rows)}  # colours come again
        sessions = max(len(row.results[0].R) for row in rows)
        dashes = {name: ["-", "--", "-.", ":"][n % 4] for name, n in rounds.items()}
        for row in rows:
            lines = _known(row)
            colour, ours = colour_of[row.name], row.label == "DoSAPP"
            if lines.shape[1] == 1:  # joint training: one session, which ends where the others end
                axes.plot(sessions, lines.mean(), "D", ms=6, color=colour, label=title(row))
                continue
            x, mean = np.arange(1, lines.shape[1] + 1), lines.mean(axis=0)
            look = {"lw": 2.5, "zorder": 3} if ours else {"lw": 1.4, "ls": dashes[row.name]}
            axes.plot(x, mean, marker="o", ms=4, color=colour, label=title(row), **look)
            if len(lines) > 1:
                spread = lines.std(axis=0, ddof=1)
                axes.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.15, lw=0)
        axes.set(xlabel="session", ylabel=SO_FAR)
        axes.xaxis.get_major_locator().set_params(integer=True)
        _legend(axes, rows)
    return figure


def forgetting_maps(rows: Sequence[Row]) -> Figure:
    """F[t, i] = R[i, i] - R[t, i], mean over seeds; blue is forgotten less than nothing."""
    rows = [row for row in rows if len(row.results[0].R) > 1]
    many = len(rows) > LEGIBLE
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
            picture = axes.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit)
            size = len(values)
            axes.set(title=title(row), xlabel="task", ylabel="after session")
            step = max(1, size // 5)
            axes.set_xticks(range(0, size, step), range(1, size + 1, step))
            axes.set_yticks(range(0, size, step), range(2, size + 2, step))
            for boundary in row.results[0].stream["boundaries"]:
                axes.axvline(boundary - 0.5, color="black", lw=1)
                axes.axhline(boundary - 1.5, color="black", lw=1)
        figure.colorbar(
            picture, ax=list(grid.flat), label="forgotten, points", shrink=min(0.8, 2 / down)
        )
    return figure


def before_after(rows: Sequence[Row], colour_of: Mapping[str, str]) -> Figure | None:
    """What the unlabelled stream did to the tasks before the current one."""
    rows = [
        row
        for row in rows
        if row.results[0].previous_tasks["before"] != row.results[0].previous_tasks["after"]
    ]
    if not rows:
        return None
    if len(rows) > LEGIBLE // 2:  # two lines each
        gains = [_earlier(row, "after") - _earlier(row, "before") for row in rows]
        return _sheet(
            rows, gains, "accuracy on earlier tasks, points won on the stream", signed=True
        )
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
        for row in rows:
            for when, style in (("before", "--"), ("after", "-")):
                mean = _earlier(row, when)
                x, label = np.arange(1, len(mean) + 1), f"{title(row)}, {when}"
                axes.plot(x, mean, style, color=colour_of[row.name], label=label)
        axes.set(xlabel="session", ylabel="accuracy on earlier tasks, %")
        axes.xaxis.get_major_locator().set_params(integer=True)
        _legend(axes, rows)
    return figure


def _earlier(row: Row, when: str) -> Values:
    """Accuracy on the tasks before each session, mean over seeds."""
    return np.mean([np.array(r.previous_tasks[when], dtype=float) for r in row.results], axis=0)


def _sheet(rows: Sequence[Row], lines: Sequence[Values], head: str, signed: bool = False) -> Figure:
    """Rows × sessions as coloured numbers, best at the end first: for more rows than lines can
    tell apart. A row of one session (joint training) stands under the last."""
    sessions = max(map(len, lines))
    order = sorted(range(len(rows)), key=lambda n: -np.nan_to_num(lines[n][-1]))
    values = np.full((len(rows), sessions), np.nan)
    for place, n in enumerate(order):
        values[place, -len(lines[n]) :] = lines[n]
    far = float(np.nanmax(np.abs(values)))
    span = {"vmin": -far, "vmax": far, "cmap": "RdBu"} if signed else {"cmap": "Blues"}
    with plt.rc_context(STYLE | {"axes.grid": False}):
        size = (max(3.6, 2.0 + 0.52 * sessions), 1 + 0.2 * len(rows))
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        picture = axes.imshow(values, aspect="auto", **span)
        for (y, x), value in np.ndenumerate(values):
            if np.isfinite(value):
                shade = picture.norm(value)
                dark = abs(shade - 0.5) > 0.3 if signed else shade > 0.6
                ink = "white" if dark else "black"
                text = f"{value:+.1f}" if signed else f"{value:.1f}"
                axes.text(x, y, text, ha="center", va="center", size=6, color=ink)
        axes.set_xticks(range(sessions), range(1, sessions + 1), size=8)
        axes.set_yticks(range(len(rows)), [title(rows[n]) for n in order], size=7)
        for tick, n in zip(axes.get_yticklabels(), order, strict=True):
            tick.set_color(OURS if rows[n].label.startswith("DoSAPP") else OTHER)
        axes.set_xlabel("session")
        axes.set_title(head, size=9, loc="left")
    return figure


def plane(rows: Sequence[Row], colour_of: Mapping[str, str]) -> Figure | None:
    """Accuracy at the end against forgetting; the best corner is the upper left."""
    bounds = [row for row in rows if row.label in BOUNDS]
    rows = [row for row in rows if row.values("forgetting") and row.label not in BOUNDS]
    if len(rows) < 2:
        return None
    if len(rows) > LEGIBLE:
        return _ranked(rows, bounds, colour_of)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 5.4), layout="constrained")
        points = []
        for row in rows:
            x, y = (np.array(row.values(name)) for name in ("forgetting", "accuracy"))
            spread = {"xerr": x.std(ddof=1), "yerr": y.std(ddof=1)} if len(x) > 1 else {}
            colour = colour_of[row.name]
            axes.errorbar(x.mean(), y.mean(), fmt="o", color=colour, elinewidth=0.6, **spread)
            points.append((float(x.mean()), float(y.mean()), title(row)))
        axes.set(xlabel="forgotten, points", ylabel="accuracy at the end, %")
        figure.draw_without_rendering()  # now the axes know where a point is on the page
        taken: list[tuple[float, float]] = []
        for left, high, name in sorted(points, key=lambda point: -point[1]):
            across, up = axes.transData.transform((left, high)) * 72 / figure.dpi
            shift = 3.0
            while any(abs(across - a) < 70 and abs(up + shift - u) < 7.5 for a, u in taken):
                shift -= 7.5  # a label that would cover another goes below it
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


def _ranked(rows: Sequence[Row], bounds: Sequence[Row], colour_of: Mapping[str, str]) -> Figure:
    """The same two numbers for more rows than a plane can name, best accuracy first:
    rows that keep pictures hollow, and dotted where learning nothing, or all at once, ends."""
    rows = sorted(rows, key=lambda row: float(np.mean(row.values("accuracy"))))
    with plt.rc_context(STYLE):
        figure, pair = plt.subplots(
            1, 2, figsize=(7.2, 1.2 + 0.2 * len(rows)), layout="constrained", sharey=True
        )
        heads = {"accuracy": "accuracy at the end, %", "forgetting": "forgotten, points"}
        for axes, (metric, head) in zip(pair, heads.items(), strict=True):
            for n, row in enumerate(rows):
                x = np.array(row.values(metric))
                spread = {"xerr": x.std(ddof=1)} if len(x) > 1 else {}
                fill = {"mfc": "white"} if row.keeps_pictures else {}
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
        hollow = pair[1].plot([], [], mfc="white", label="keeps pictures", **look)
        if any(row.keeps_pictures for row in rows):
            above = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderpad": 0}
            pair[1].legend(handles=hollow, frameon=False, fontsize=7, **above)
        pair[0].set_ylim(-0.7, len(rows) - 0.3)
        pair[0].set_yticks(range(len(rows)), [title(row) for row in rows], size=7)
    return figure


def labels_right(rows: Sequence[Row], colour_of: Mapping[str, str]) -> Figure | None:
    """Accuracy of the labels the adapter used, session by session."""
    rows = [row for row in rows if any(x is not None for x in row.results[0].pseudo_labels)]
    if not rows:
        return None
    seeds = [np.array([r.pseudo_labels for r in row.results], dtype=float) for row in rows]
    # A gate may let nothing through.
    means = [np.ma.masked_invalid(lines).mean(axis=0).filled(np.nan) for lines in seeds]
    head = "labels that were right, %"
    if len(rows) > LEGIBLE // 2:  # they lie close together
        return _sheet(rows, means, head)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
        for row, mean in zip(rows, means, strict=True):
            x = np.arange(1, len(mean) + 1)
            axes.plot(x, mean, "o-", ms=4, color=colour_of[row.name], label=title(row))
        axes.set(xlabel="session", ylabel=head)
        axes.xaxis.get_major_locator().set_params(integer=True)
        _legend(axes, rows)
    return figure


def costs(rows: Sequence[Row], colour_of: Mapping[str, str]) -> Figure | None:
    """Seconds and peak memory, each measured in its own run."""
    if not any(row.values("peak_memory") for row in rows):
        return None
    with plt.rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure, pair = plt.subplots(
            1, 2, figsize=(7.2, 1 + 0.24 * len(rows)), layout="constrained", sharey=True
        )
        names = [title(row) for row in rows]
        for axes, metric, words in zip(
            pair, ("seconds", "peak_memory"), ("seconds of learning", "peak MB"), strict=True
        ):
            values = [float(row.mean(metric) or 0) for row in rows]
            axes.barh(names, values, color=[colour_of[row.name] for row in rows])
            axes.set(xlabel=words)
        pair[0].margins(y=0.01)
        pair[0].invert_yaxis()
        pair[0].tick_params(axis="y", labelsize=8)
    return figure


def _legend(axes: Any, rows: Sequence[Row]) -> None:
    small = {"fontsize": 9 if len(rows) < 12 else 6.5, "ncols": 1 + len(rows) // 24}
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), **small)


def swept(rows: Sequence[Row]) -> Figure | None:
    """Accuracy and forgetting over every number that varies alone."""
    found = list(sweeps(rows))
    if not found:
        return None
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            len(found), 2, figsize=(7.2, 2.3 * len(found)), layout="constrained", squeeze=False
        )
        heads = {"accuracy": "accuracy at the end, %", "forgetting": "forgotten, points"}
        for pair, sweep in zip(grid, found, strict=True):
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


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    colour_of = colours(rows)  # the same in every figure
    drawn = {"accuracy": curves(rows, colour_of)}
    if any(len(row.results[0].R) > 1 for row in rows):
        drawn["forgetting"] = forgetting_maps(rows)
    found = {
        "stream": before_after(rows, colour_of),
        "plane": plane(rows, colour_of),
        "labels": labels_right(rows, colour_of),
        "sweeps": swept(rows),
        "costs": costs(rows, colour_of),
    }
    return drawn | {name: figure for name, figure in found.items() if figure is not None}


def sides(seconds: Mapping[str, Any]) -> Figure:
    """The benchmark's steps, ours and the plain one's, each as a multiple of ours."""
    with plt.rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure, axes = plt.subplots(figsize=(7.2, 0.8 + 0.6 * len(seconds)), layout="constrained")
        colour_of = {"ours": OURS, "plain": TUNED, "bare": BOUND}
        for n, times in enumerate(seconds.values()):
            shown = {side: times[side] for side in colour_of if side in times}
            for place, (side, time) in enumerate(shown.items()):
                length = time["median"] / times["ours"]["median"]
                axes.barh(n + 0.27 * (place - 1), length, 0.25, color=colour_of[side],
                          xerr=time["spread"] * length,
                          label=side if n == 0 else None)  # fmt: skip
        names = [name.replace("_", " ") for name in seconds]
        axes.set_yticks(range(len(names)), names, size=8)
        axes.invert_yaxis()
        axes.set(xlabel="time, as a multiple of ours")
        axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def growth(found: Mapping[str, Any]) -> Figure:
    """Points and the line through them, for everything that can grow."""
    heads = {
        "classes": ("classes", "step, s"),
        "batch": ("batch", "step, s"),
        "tasks": ("tasks seen", "step ÷ bare forward"),
        "bytes": ("tasks seen", "held beside one model, MB"),
    }
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(2, 2, figsize=(7.2, 5.0), layout="constrained")
        for axes, (name, (across, up)) in zip(grid.flat, heads.items(), strict=True):
            one, times = found[name], 1e-6 if name == "bytes" else 1.0
            x, y = np.array(one["x"], dtype=float), times * np.array(one["y"])
            axes.plot(x, y, "o", ms=4, color=OURS)
            axes.plot(x, times * (one["start"] + one["slope"] * x), lw=1, color=BOUND)
            axes.set(xlabel=across, ylabel=up, ylim=(0, 1.15 * y.max()))
    return figure


def write(
    figure: Figure, folder: Path, name: str, suffixes: Sequence[str] = ("png", "svg", "pdf")
) -> None:
    for suffix in suffixes:
        figure.savefig(
            folder / f"{name}.{suffix}",
            dpi=150,
            metadata={"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix),
        )


def inline_svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
