"""Figures of the drills."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from dosapp.report.figures import BOUND, OURS, STYLE, TUNED, save_figure

POISON_COLUMNS = 4
TITLE_WIDTH = 32  # characters of a line
POISON_STYLES = ("o-", "s-.", "^--")  # by scenario


def write_figure(name: str, result: Mapping[str, Any], folder: Path) -> None:
    """Write the figure of a drill as PNG and SVG, if it has one.

    Args:
        name: Of the drill.
        result: The content of its JSON file.
        folder: Where the files go.
    """
    plots = {"guards": lambda: plot_guards(result["outcomes"]),
             "poison": lambda: plot_poison(result["outcomes"]),
             "load": lambda: plot_load(result["curve"]),
             "availability": lambda: plot_availability(result["floods"])}  # fmt: skip
    if name in plots:
        figure = plots[name]()
        save_figure(figure, folder, name, ("png", "svg"))
        plt.close(figure)


def plot_guards(outcomes: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot the accuracy gained or lost on held-out images by each stream; dots are seeds."""
    streams = list(dict.fromkeys(o["stream"] for o in outcomes))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
        for side, (on, colour) in enumerate(((False, TUNED), (True, OURS))):
            for index, stream in enumerate(streams):
                group = [o for o in outcomes if o["stream"] == stream and o["guards"] is on]
                changes = [o["lived"] - o["frozen"] for o in group]
                x = index + (side - 0.5) * 0.36
                label = f"guards {'on' if on else 'off'}" if index == 0 else None
                axes.bar(x, np.mean(changes), 0.32, color=colour, alpha=0.75, label=label)
                axes.plot([x] * len(changes), changes, "o", ms=3, color="black", zorder=3)
        axes.axhline(0, color=BOUND, lw=1)
        axes.axhline(-2, color=BOUND, lw=1, ls=":")
        axes.set_xticks(range(len(streams)), streams)
        axes.set(ylabel="points against the frozen learner")
        axes.grid(visible=False, axis="x")
        axes.legend(frameon=False)
    return figure


def plot_poison(outcomes: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot the change of accuracy over intervals, one panel per attack and a line per scenario."""
    attacks = list(dict.fromkeys(o["attack"] for o in outcomes))
    scenarios = list(dict.fromkeys(o["scenario"] for o in outcomes))
    columns = min(POISON_COLUMNS, len(attacks))
    rows = -(-len(attacks) // columns)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            rows, columns, figsize=(2.3 * columns, max(2.8, 1.9 * rows)), sharex=True, sharey=True,
            layout="constrained", squeeze=False,
        )  # fmt: skip
        for attack, panel in zip(attacks, axes.flat, strict=False):
            for on, colour in ((False, TUNED), (True, OURS)):
                for o in (o for o in outcomes if o["attack"] == attack and o["guards"] is on):
                    changes = np.array(o["accuracies"]) - o["accuracies"][0]
                    style = POISON_STYLES[scenarios.index(o["scenario"])]
                    label = f"{o['scenario']}, guards {'on' if on else 'off'}"
                    panel.plot(changes, style, ms=3, color=colour, label=label)
            panel.axhline(-2, color=BOUND, lw=1, ls=":")
            panel.set_title(fill(attack, TITLE_WIDTH), fontsize=9)
        for panel in axes.flat[len(attacks) :]:
            panel.set_axis_off()
        lines, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=8)
        figure.supxlabel("intervals of 20 steps", fontsize=9)
        axes[0, 0].xaxis.get_major_locator().set_params(integer=True)
        figure.supylabel("held-out accuracy, points", fontsize=9)
    return figure


def plot_load(curve: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot latency and the share of images that are learned from, against load."""
    load = [100 * row["share"] for row in curve]
    with plt.rc_context(STYLE):
        figure, (latency, adapted) = plt.subplots(1, 2, figsize=(8.6, 3.4), layout="constrained")
        for side, colour in (("off", BOUND), ("on", OURS)):
            for statistic, style in (("median", "-"), ("p95", "--")):
                values = [1000 * row[side][statistic] for row in curve]
                label = f"adaptation {side}, {statistic}"
                latency.plot(load, values, style, marker="o", ms=4, color=colour, label=label)
        latency.set(xlabel="load, % of capacity", ylabel="latency, ms", ylim=(0, None))
        latency.legend(frameon=False, fontsize=8)
        shares = [100 * min(1.0, row["on"]["adapted"]) for row in curve]
        adapted.plot(load, shares, marker="o", color=OURS)
        adapted.axhline(95, color=BOUND, ls=":", lw=1)
        adapted.set(xlabel="load, % of capacity", ylabel="images learned from, %", ylim=(0, 103))
    return figure


def plot_availability(floods: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot honest callers' p95 and the service's memory during each flood, against quiet."""
    names = [row["flood"] for row in floods]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.6), layout="constrained", sharey=True)
        for side, (key, label, limit) in enumerate(
            (("p95_ratio", "p95 of honest callers ÷ quiet", 3.0),
             ("memory_ratio", "memory ÷ quiet", 1.5))
        ):  # fmt: skip
            axes[side].barh(names, [row[key] for row in floods], 0.6, color=OURS, alpha=0.75)
            axes[side].axvline(limit, color=BOUND, ls=":", lw=1)
            axes[side].axvline(1, color=BOUND, lw=1)
            axes[side].set(xlabel=label, xlim=(0, None))
            axes[side].grid(visible=False, axis="y")
        axes[0].invert_yaxis()
    return figure
