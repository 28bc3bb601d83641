"""What the benchmark found → a table beside its targets, and pictures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dosapp.errors import InputError
from dosapp.runtime.files import write_bytes, write_json

# name → what it is, required, target; a ≤ says that smaller is better
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


def table(found: Mapping[str, Any] | None) -> str:
    """Markdown, with the targets; what was not measured says so."""
    ratios = found["ratios"] if found else {}
    lines = ["| figure | required | target | measured |", "|---|---|---|---|"]
    for name, (words, required, target) in TARGETS.items():
        value = ratios.get(name)
        said = UNMEASURED if value is None else f"{value:.3f}"
        lines.append(f"| {words} | {required} | {target} | {said} |")
    return "\n".join(lines) + "\n"


def details(found: Mapping[str, Any]) -> str:
    """Seconds of every side, and what is told beside the ratios."""
    lines = ["| | side | median s | spread |", "|---|---|---|---|"]
    for name, sides in found["seconds"].items():
        for side, time in sides.items():
            row = f"| {name} | {side} | {time['median']:.3f} | {100 * time['spread']:.0f} % |"
            lines.append(row)
    lines += ["", "| beside | ratio |", "|---|---|"]
    lines += [f"| {name} | {value:.3f} |" for name, value in found["more"].items()]
    return "\n".join(lines) + "\n"


def slopes(growth: Mapping[str, Any] | None) -> str:
    """What one more of something costs."""
    units = {
        "classes": ("step against classes", "ms per class", 1000),
        "batch": ("step against batch", "ms per image", 1000),
        "tasks": ("step ÷ bare forward, against tasks", "per task", 1),
        "update_share": ("EMA + optimizer share, against tasks", "per task", 1),
        "bytes": ("memory against tasks", "MB per task", 1e-6),
    }
    lines = ["| | from → to | slope | grown over all of it |", "|---|---|---|---|"]
    for name, (words, unit, times) in units.items():
        one = growth and growth[name]
        said = [UNMEASURED] * 3
        if one:
            grown = f"{100 * one['grown']:.0f} %"
            said = [f"{one['x'][0]} → {one['x'][-1]}", f"{times * one['slope']:.4g} {unit}", grown]
        lines.append(f"| {words} | {' | '.join(said)} |")
    return "\n".join(lines) + "\n"


def write_speed(found: Mapping[str, Any], folder: Path) -> None:
    """`bench.json`, `bench.md`, and figures as PNG and SVG."""
    try:
        import matplotlib.pyplot as plt

        from dosapp.report import figures
    except ImportError as error:
        raise InputError(f"pictures need {error.name}; pip install 'dosapp[report]'") from error
    folder.mkdir(parents=True, exist_ok=True)
    text = f"{table(found)}\n{details(found)}"
    drawn = {"bench": figures.sides(found["seconds"])}
    if "growth" in found:
        text += f"\n{slopes(found['growth'])}"
        drawn["growth"] = figures.growth(found["growth"])
    for name, figure in drawn.items():
        figures.write(figure, folder, name, ("png", "svg"))
        plt.close(figure)
    write_bytes(folder / "bench.md", text.encode())
    write_json(folder / "bench.json", found)
