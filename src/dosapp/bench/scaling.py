"""How a step on the stream grows: with classes, with the batch, and with the sessions behind it."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dosapp.bench.implementations import Implementations
from dosapp.bench.measure import ProgressCallback, race

CLASSES = (10, 30, 100, 300, 1000)
BATCHES = (4, 8, 16, 32)
TASKS = (1, 2, 5, 10, 20, 50)


def growth(
    config: Mapping[str, Any],
    *,
    batch: int = 8,
    many: int = 100,
    repeats: int = 3,
    classes: Sequence[int] = CLASSES,
    batches: Sequence[int] = BATCHES,
    tasks: Sequence[int] = TASKS,
    watch: ProgressCallback = lambda words: None,
) -> dict[str, Any]:
    """Median seconds at every size, and the slope of the line through them. All sizes of one kind
    take turns; the sessions cannot, so a bare forward is timed beside each of them."""
    sides = Implementations(config)
    sides.sized(batch, many).stream()  # warm
    found: dict[str, Any] = {}
    for name, sizes in (
        ("classes", {n: (batch, n) for n in classes}),
        ("batch", {n: (n, many) for n in batches}),
    ):
        watch(f"growth with {name}")
        shapes = {str(n): shape for n, shape in sizes.items()}
        steps = dict.fromkeys(shapes, sides.stream)
        times = race(steps, repeats, _sizing(sides, shapes))
        found[name] = line(list(sizes), [times[n].median for n in shapes])
    sides.sized(batch, many)
    seconds, held, shares, done = [], [], [], 0
    for count in tasks:
        watch(f"growth with tasks: {count}")
        for task in range(done, count):
            sides.masked(task)  # a random tenth: the union grows as fast as it can
            sides.stream()
        done = count
        times = race({"step": sides.stream, "bare": sides.bare}, repeats)
        seconds.append(times["step"].median / times["bare"].median)
        shares.append(sides.update_share(repeats))
        held.append(sides.held())
    found["tasks"] = line(tasks, seconds)
    found["update_share"] = line(tasks, shares)
    found["bytes"] = line(tasks, held)
    return found | {"of": {"batch": batch, "classes": many, "repeats": repeats}}


def _sizing(
    sides: Implementations, shapes: Mapping[str, tuple[int, int]]
) -> Callable[[str], object]:
    return lambda name: sides.sized(*shapes[name])


def line(x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    """Points, the least-squares line through them, and its growth from first to last point as a
    share of the first value."""
    slope, start = np.polyfit(x, y, 1) if len(x) > 1 else (0.0, y[0])
    grown = slope * (x[-1] - x[0]) / y[0] if y[0] else math.nan
    return {
        "x": list(x),
        "y": [float(value) for value in y],
        "slope": float(slope),
        "start": float(start),
        "grown": float(grown),
    }
