"""What drills found, as pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from dosapp.report.figures import BOUND, OURS, STYLE, TUNED, write


def draw(name: str, found: Mapping[str, Any], folder: Path) -> None:
    """PNG and SVG of the drills that have something to look at."""
    figures = {"guards": lambda: guards(found["outcomes"]), "load": lambda: load(found["curve"])}
    if name in figures:
        figure = figures[name]()
        write(figure, folder, name, ("png", "svg"))
        plt.close(figure)


def guards(outcomes: Sequence[Mapping[str, Any]]) -> Figure:
    """Points gained or lost on held-out pictures by living through a stream; dots are seeds."""
    streams = list(dict.fromkeys(o["stream"] for o in outcomes))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
        for side, (on, colour) in enumerate(((False, TUNED), (True, OURS))):
            for x, stream in enumerate(streams):
                mine = [o for o in outcomes if o["stream"] == stream and o["guards"] is on]
                changes = [o["lived"] - o["frozen"] for o in mine]
                place = x + (side - 0.5) * 0.36
                words = f"guards {'on' if on else 'off'}" if x == 0 else None
                axes.bar(place, np.mean(changes), 0.32, color=colour, alpha=0.75, label=words)
                axes.plot([place] * len(changes), changes, "o", ms=3, color="black", zorder=3)
        axes.axhline(0, color=BOUND, lw=1)
        axes.axhline(-2, color=BOUND, lw=1, ls=":")
        axes.set_xticks(range(len(streams)), streams)
        axes.set(ylabel="points against the frozen learner")
        axes.grid(visible=False, axis="x")
        axes.legend(frameon=False)
    return figure


def load(curve: Sequence[Mapping[str, Any]]) -> Figure:
    """Latency and the share of pictures that are learned from, against load."""
    share = [100 * row["share"] for row in curve]
    with plt.rc_context(STYLE):
        figure, (time, kept) = plt.subplots(1, 2, figsize=(8.6, 3.4), layout="constrained")
        for side, colour in (("off", BOUND), ("on", OURS)):
            for figures, style in (("median", "-"), ("p95", "--")):
                values = [1000 * row[side][figures] for row in curve]
                words = f"adaptation {side}, {figures}"
                time.plot(share, values, style, marker="o", ms=4, color=colour, label=words)
        time.set(xlabel="load, % of capacity", ylabel="latency, ms", ylim=(0, None))
        time.legend(frameon=False, fontsize=8)
        learned = [100 * min(1.0, row["on"]["adapted"]) for row in curve]
        kept.plot(share, learned, marker="o", color=OURS)
        kept.axhline(95, color=BOUND, ls=":", lw=1)
        kept.set(xlabel="load, % of capacity", ylabel="pictures learned from, %", ylim=(0, 103))
    return figure
