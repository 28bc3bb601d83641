"""Tables and figures of the benchmark, beside its targets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dosapp.runtime.extras import check_extra
from dosapp.runtime.files import ensure_dir, write_bytes, write_json

# name → description, required, target; ≤: smaller is better
TARGETS = {
    "ttl_batch64_classes100": ("TTL step, batch 64, 100 classes: plain ÷ ours", "1.45", "1.55"),
    "ttl_batch8_classes200": ("TTL step, batch 8, 200 classes: plain ÷ ours", "3.0", "4.0"),
    "supervised_batch64_classes10": (
        "supervised step, batch 64, 10 classes: plain ÷ ours",
        "1.12",
        "1.16",
    ),
    "limit": ("TTL step at batch 64, 100 classes ÷ 3.33 image forwards", "≤ 1.2", "1.08"),
    "memory": ("memory beyond one inference-only model: ours ÷ plain", "≤ 0.35", "0.2"),
    "update_share": ("EMA + optimizer share of a TTL step at batch 8", "≤ 0.05", "0.02"),
    "allreduce": ("bytes all-reduced per step ÷ dense candidates", "≤ 0.11", ""),
}
UNMEASURED = "not measured yet"


def format_ratios(benchmark: Mapping[str, Any] | None) -> str:
    """The ratios beside their targets, in Markdown.

    Args:
        benchmark: The contents of `bench.json`; None: nothing has been measured.
    """
    ratios = benchmark["ratios"] if benchmark else {}
    lines = ["| quantity | required | target | measured |", "|---|---|---|---|"]
    for name, (description, required, target) in TARGETS.items():
        value = ratios.get(name)
        measured = UNMEASURED if value is None else f"{value:.3f}"
        lines.append(f"| {description} | {required} | {target} | {measured} |")
    return "\n".join(lines) + "\n"


def format_details(benchmark: Mapping[str, Any]) -> str:
    """Seconds of every implementation and the further ratios, in Markdown."""
    lines = ["| step | implementation | median s | spread |", "|---|---|---|---|"]
    for name, implementations in benchmark["seconds"].items():
        for implementation, time in implementations.items():
            spread = f"{100 * time['spread']:.0f} %"
            lines.append(f"| {name} | {implementation} | {time['median']:.3f} | {spread} |")
    lines += ["", "| further ratio | measured |", "|---|---|"]
    lines += [f"| {name} | {value:.3f} |" for name, value in benchmark["more"].items()]
    return "\n".join(lines) + "\n"


def format_growth(scaling: Mapping[str, Any] | None) -> str:
    """Slopes over classes, batch size and tasks, in Markdown.

    Args:
        scaling: The field `growth` of `bench.json`; None: nothing has been measured.
    """
    units = {
        "classes": ("step against classes", "ms per class", 1000),
        "batch": ("step against batch", "ms per image", 1000),
        "tasks": ("step ÷ bare forward, against tasks", "per task", 1),
        "update_share": ("EMA + optimizer share, against tasks", "per task", 1),
        "bytes": ("memory against tasks", "MB per task", 1e-6),
    }
    lines = ["| quantity | from → to | slope | total increase |", "|---|---|---|---|"]
    for name, (description, unit, factor) in units.items():
        cells = [UNMEASURED] * 3
        if scaling:
            fit = scaling[name]
            slope = f"{factor * fit['slope']:.4g} {unit}"
            cells = [f"{fit['x'][0]} → {fit['x'][-1]}", slope, f"{100 * fit['grown']:.0f} %"]
        lines.append(f"| {description} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def format_costs(costs: Mapping[str, Mapping[str, float]]) -> str:
    """Cost of a stream step, method against method (`compare_methods`), in Markdown."""
    unit = next(iter(costs))
    lines = [
        f"| method | stream step ÷ {unit}'s | spread | copied weights, MB | head, MB |",
        "|---|---|---|---|---|",
    ]
    for name, cost in costs.items():
        time = f"{cost['time']:.2f} | {100 * cost['spread']:.0f} %"
        lines.append(f"| {name} | {time} | {cost['copies_mb']:.1f} | {cost['head_mb']:.1f} |")
    return "\n".join(lines) + "\n"


def write_speed(benchmark: Mapping[str, Any], folder: Path) -> None:
    """Write `bench.json`, `bench.md`, and figures as PNG and SVG."""
    check_extra("a figure", "report")
    import matplotlib.pyplot as plt

    from dosapp.report import figures

    ensure_dir(folder)
    text = f"{format_ratios(benchmark)}\n{format_details(benchmark)}"
    drawn = {"bench": figures.plot_benchmark(benchmark["seconds"])}
    if "growth" in benchmark:
        text += f"\n{format_growth(benchmark['growth'])}"
        drawn["growth"] = figures.plot_scaling(benchmark["growth"])
    for name, figure in drawn.items():
        figures.save_figure(figure, folder, name, ("png", "svg"))
        plt.close(figure)
    write_bytes(folder / "bench.md", text.encode())
    write_json(folder / "bench.json", benchmark)
