"""How the time of a stream step grows with classes, with the batch, and with past sessions."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dosapp.bench.implementations import Implementations
from dosapp.bench.measure import ProgressCallback, time_alternating

CLASSES = (10, 30, 100, 300, 1000)
BATCHES = (4, 8, 16, 32)
TASKS = (1, 2, 5, 10, 20, 50)


def measure_growth(
    config: Mapping[str, Any],
    *,
    batch_size: int = 8,
    num_classes: int = 100,
    repeats: int = 3,
    classes: Sequence[int] = CLASSES,
    batches: Sequence[int] = BATCHES,
    tasks: Sequence[int] = TASKS,
    on_progress: ProgressCallback = lambda message: None,
) -> dict[str, Any]:
    """Measure a stream step at every size and fit a line through the medians.

    Sizes of one kind alternate. Sessions cannot, so a bare forward is timed beside each of them.

    Args:
        config: Fields of a `CLIPConfig`.
        batch_size: Images per batch where the batch does not vary.
        num_classes: Classes where they do not vary.
        repeats: Timed rounds.
        classes: Numbers of classes.
        batches: Batch sizes.
        tasks: Numbers of sessions, ascending; each selects a random mask.
        on_progress: Called with a message before each part.

    Returns:
        The content of `bench.json` under `growth`.
    """
    pair = Implementations(config)
    pair.set_size(batch_size, num_classes).stream_step()  # warm-up
    lines: dict[str, Any] = {}
    for name, sizes in (
        ("classes", {n: (batch_size, n) for n in classes}),
        ("batch", {n: (n, num_classes) for n in batches}),
    ):
        on_progress(f"growth with {name}")
        shapes = {str(n): shape for n, shape in sizes.items()}
        steps = dict.fromkeys(shapes, pair.stream_step)
        timings = time_alternating(steps, repeats, _set_size_of(pair, shapes))
        lines[name] = fit_line(list(sizes), [timings[n].median for n in shapes])
    pair.set_size(batch_size, num_classes)
    forwards, num_bytes, shares, done = [], [], [], 0
    for count in tasks:
        on_progress(f"growth with tasks: {count}")
        for task in range(done, count):
            pair.set_random_mask(task)  # random: the union grows as fast as it can
            pair.stream_step()
        done = count
        timings = time_alternating({"step": pair.stream_step, "bare": pair.encode_images}, repeats)
        forwards.append(timings["step"].median / timings["bare"].median)
        shares.append(pair.update_share(repeats))
        num_bytes.append(pair.extra_bytes())
    lines["tasks"] = fit_line(tasks, forwards)
    lines["update_share"] = fit_line(tasks, shares)
    lines["bytes"] = fit_line(tasks, num_bytes)
    return lines | {"of": {"batch": batch_size, "classes": num_classes, "repeats": repeats}}


def _set_size_of(
    pair: Implementations, shapes: Mapping[str, tuple[int, int]]
) -> Callable[[str], object]:
    return lambda name: pair.set_size(*shapes[name])


def fit_line(x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    """Fit a least-squares line.

    Returns:
        The points, `slope`, `start` (the intercept), and `grown`: the line's growth from the first
        to the last point as a share of the first value.

    Example:
        >>> round(fit_line([1, 2, 3], [2.0, 4.0, 6.0])["slope"], 6)
        2.0
    """
    slope, start = np.polyfit(x, y, 1) if len(x) > 1 else (0.0, y[0])
    grown = slope * (x[-1] - x[0]) / y[0] if y[0] else math.nan
    return {
        "x": list(x),
        "y": [float(value) for value in y],
        "slope": float(slope),
        "start": float(start),
        "grown": float(grown),
    }
