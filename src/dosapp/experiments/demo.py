"""The first minute: six ways to live through five lessons, side by side."""

from collections.abc import Callable, Sequence
from pathlib import Path

from dosapp.experiments.result import Result
from dosapp.experiments.run import RunCallback
from dosapp.experiments.store import Store
from dosapp.report import write_report
from dosapp.report.tables import Row
from dosapp.settings import RunSettings

STAGE = {"data": "shapes", "classes": 50, "tasks": 5}
CAST: Sequence[dict[str, str]] = (
    {"method": "zero-shot"},
    {"method": "flyp"},
    {"method": "spu"},
    {"method": "spu", "adapt": "self-training"},
    {"method": "dosapp"},
    {"method": "joint"},
)


def demo(
    folder: Path,
    seed: int = 0,
    watch: Callable[[RunSettings], RunCallback] = lambda s: RunCallback(),
) -> tuple[list[Row], list[Result]]:
    """Run the cast (whatever is not there already) and write the report."""
    store, results = Store(folder / "runs"), []
    for part in CAST:
        settings = RunSettings.parse({**STAGE, **part, "seed": seed})
        results.append(store.get(settings, watch(settings)))
    return write_report(results, folder, "DoSAPP: five lessons and what is left of them"), results
