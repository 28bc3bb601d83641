"""What a mean hides: the worst runs, calibration, and variance over seeds and class orders."""

import json
import math
from collections.abc import Sequence

import numpy as np

from dosapp.experiments.identity import comparable_settings
from dosapp.experiments.result import CLASS_ORDER_SETTINGS
from dosapp.report.tables import Row, format_mean_std, markdown_lines

COLUMNS = ("worst tenth", "ECE ↓", "over seeds", "over class orders", "runs")


def tail_mean(values: Sequence[float]) -> float:
    """The mean of the worst tenth of runs, of at least one.

    Example:
        >>> tail_mean([80.0, 82.0, 70.0])
        70.0
    """
    return float(np.mean(sorted(values)[: math.ceil(len(values) / 10)]))


def group_orders(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows that differ in the order of their classes only."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        settings = comparable_settings(row.results[0].settings)
        rest = {k: v for k, v in settings.items() if k not in CLASS_ORDER_SETTINGS}
        groups.setdefault(json.dumps([row.data, rest], sort_keys=True), []).append(row)
    return list(groups.values())


def robustness_table(rows: Sequence[Row]) -> str:
    """A Markdown table of accuracy in the worst tenth of runs, ECE and two standard deviations.

    The deviation over seeds is pooled over class orders. The one over class orders is that of the
    means of each order, so it holds a part of the seeds' as well.
    """
    lines = [["method", *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
    for group in group_orders(rows):
        values = [row.values("accuracy") for row in group]
        errors = [error for row in group for error in row.values("calibration_error")]
        variances = [np.var(seeds, ddof=1) for seeds in values if len(seeds) > 1]
        means = [float(np.mean(seeds)) for seeds in values]
        lines.append(
            [
                min((row.name for row in group), key=len),
                f"{tail_mean([value for seeds in values for value in seeds]):.1f}",
                format_mean_std(errors),
                f"{math.sqrt(np.mean(variances)):.1f}" if variances else "–",
                f"{np.std(means, ddof=1):.1f}" if len(means) > 1 else "–",
                str(sum(len(seeds) for seeds in values)),
            ]
        )
    return markdown_lines(lines)
