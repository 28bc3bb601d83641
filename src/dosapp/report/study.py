"""Comparisons of a study: paired differences, corrected for their number, and a Pareto figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dosapp.experiments.result import Result, check_paired
from dosapp.report.tables import COSTS, markdown_lines
from dosapp.runtime.extras import check_extra

METRICS = {
    "accuracy": "Acc ↑",
    "forgetting": "F ↓",
    "current_task_accuracy": "CTA ↑",
    "calibration_error": "ECE ↓",
}
Runs = Mapping[tuple[int, object], Result]  # by seed and class order


@dataclass(frozen=True)
class Comparison:
    """A variant minus the reference in one metric on one dataset, paired by seed and order."""

    dataset: str
    variant: str
    metric: str
    mean: float  # of the variant
    difference: float
    half_interval: float  # of the 95 % interval of the mean difference; infinite for one pair
    p_value: float
    pairs: int
    p_holm: float = float("nan")  # corrected for all comparisons of the metric

    @property
    def is_significant(self) -> bool:
        """Whether the difference is not zero at 5 %, corrected."""
        return self.p_holm < 0.05


def compare_variants(results: Mapping[str, Mapping[str, Runs]], reference: str) -> list[Comparison]:
    """Compare every variant with the reference, dataset by dataset.

    Args:
        results: Dataset → variant → results by seed and class order.
        reference: Name of the variant that is subtracted.

    Returns:
        The comparisons, with p-values corrected by Holm's method over all datasets and variants of
        a metric.
    """
    check_extra("a study", "report")
    from scipy import stats

    comparisons = []
    for dataset, variants in results.items():
        base = variants.get(reference, {})
        for variant, runs in variants.items():
            for metric in METRICS:
                pairs = []
                for at in runs.keys() & base.keys():
                    check_paired(runs[at], base[at])
                    a, b = runs[at].metrics.get(metric), base[at].metrics.get(metric)
                    if a is not None and b is not None:
                        pairs.append((a, b))
                if not pairs:
                    continue
                ours, theirs = np.array(pairs).T
                gaps, count = ours - theirs, len(pairs)
                half, p = float("inf"), 1.0
                if count > 1 and gaps.std() < 1e-9:  # the same gap in every pair
                    half, p = 0.0, float(abs(gaps.mean()) < 1e-9)
                elif count > 1:
                    half = float(stats.t.ppf(0.975, count - 1) * gaps.std(ddof=1) / count**0.5)
                    p = float(stats.ttest_1samp(gaps, 0.0).pvalue)
                comparisons.append(
                    Comparison(
                        dataset,
                        variant,
                        metric,
                        float(ours.mean()),
                        float(gaps.mean()),
                        half,
                        p,
                        count,
                    )
                )
    return correct_holm(comparisons, reference)


def correct_holm(comparisons: Sequence[Comparison], reference: str) -> list[Comparison]:
    """Correct p-values for the number of comparisons of the same metric (Holm, 1979)."""
    corrected = {id(c): c for c in comparisons}
    for metric in METRICS:
        family = [c for c in comparisons if c.metric == metric and c.variant != reference]
        family.sort(key=lambda c: c.p_value)
        largest = 0.0
        for rank, c in enumerate(family):
            largest = max(largest, min(1.0, (len(family) - rank) * c.p_value))
            corrected[id(c)] = replace(c, p_holm=largest)
    return [corrected[id(c)] for c in comparisons]


def format_study(comparisons: Sequence[Comparison], costs: Mapping[tuple[str, str], float]) -> str:
    """A Markdown table per dataset: means, and differences to the reference with intervals.

    Args:
        comparisons: What `compare_variants` returns.
        costs: (dataset, variant) → seconds of training as a ratio to the reference.
    """
    parts = []
    for dataset in dict.fromkeys(c.dataset for c in comparisons):
        rows = [c for c in comparisons if c.dataset == dataset]
        head = ["variant", *METRICS.values(), "time", "pairs"]
        lines = [head, ["---"] * len(head)]
        for variant in dict.fromkeys(c.variant for c in rows):
            cells = {c.metric: _format_cell(c) for c in rows if c.variant == variant}
            pairs = max(c.pairs for c in rows if c.variant == variant)
            cost = costs.get((dataset, variant))
            time = "–" if cost is None else f"{cost:.2f}"
            lines.append([variant, *(cells.get(m, "–") for m in METRICS), time, str(pairs)])
        parts += [f"**{dataset}**", "", markdown_lines(lines)]
    return "\n".join(parts)


def _format_cell(comparison: Comparison) -> str:
    """`73.7 (+18.7 ± 2.1*)`; the star is significance after Holm's correction."""
    c = comparison
    if np.isnan(c.p_holm):
        return f"{c.mean:.1f}"
    star = "*" if c.is_significant else ""
    half = "" if np.isinf(c.half_interval) else f" ± {c.half_interval:.1f}"
    return f"{c.mean:.1f} ({c.difference:+.1f}{half}{star})"


def compute_costs(
    results: Mapping[str, Mapping[str, Runs]], reference: str
) -> dict[tuple[str, str], float]:
    """Seconds of training of each variant, as a ratio to the reference's."""
    seconds = {
        (dataset, variant): float(np.mean([COSTS["seconds"](r) or 0.0 for r in runs.values()]))
        for dataset, variants in results.items()
        for variant, runs in variants.items()
        if runs
    }
    return {
        (dataset, variant): value / seconds[dataset, reference]
        for (dataset, variant), value in seconds.items()
        if seconds.get((dataset, reference))
    }


def plot_pareto(
    comparisons: Sequence[Comparison], costs: Mapping[tuple[str, str], float], path: Path
) -> None:
    """Accuracy against current-task accuracy and against cost, one row per dataset.

    Args:
        comparisons: What `compare_variants` returns.
        costs: What `compute_costs` returns.
        path: The file without suffix; PNG, SVG and PDF are written.
    """
    import matplotlib.pyplot as plt

    from dosapp.report.figures import PALETTE, STYLE, save_figure

    datasets = list(dict.fromkeys(c.dataset for c in comparisons))
    variants = list(dict.fromkeys(c.variant for c in comparisons))
    means = {(c.dataset, c.variant, c.metric): c.mean for c in comparisons}
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            len(datasets),
            2,
            figsize=(7.6, 3.2 * len(datasets)),
            layout="constrained",
            squeeze=False,
        )
        for pair, dataset in zip(grid, datasets, strict=True):
            for n, variant in enumerate(variants):
                accuracy = means.get((dataset, variant, "accuracy"))
                others = (
                    means.get((dataset, variant, "current_task_accuracy")),
                    costs.get((dataset, variant)),
                )
                for axes, x in zip(pair, others, strict=True):
                    if accuracy is not None and x is not None:
                        colour = PALETTE[n % len(PALETTE)]
                        marker = "os^Dv"[n // len(PALETTE) % 5]
                        axes.plot(x, accuracy, marker, ms=7, color=colour, label=variant)
            pair[0].set(xlabel="accuracy on the last task, %", ylabel="final accuracy, %")
            pair[0].set_title(dataset, size=10, loc="left")
            pair[1].set(xlabel="time, as a ratio to the reference")
            pair[1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
        save_figure(figure, path.parent, path.name)
        plt.close(figure)
