"""The demo: seven methods on the same five tasks of the hard embedded benchmark."""

from collections.abc import Callable, Sequence
from pathlib import Path

from dosapp.experiments.callbacks import RunCallback
from dosapp.experiments.result import Result
from dosapp.experiments.store import Store
from dosapp.settings import RunSettings

SCENARIO = {"data": "shapes-hard", "classes": 50, "tasks": 5}
METHODS: Sequence[dict[str, str]] = (
    {"method": "zero-shot"},
    {"method": "flyp"},
    {"method": "spu"},
    {"method": "spu", "adapt": "self-training"},
    {"method": "dosapp"},
    {"method": "stream-gda"},
    {"method": "joint"},
)


def run_demo(
    folder: Path,
    seed: int = 0,
    callback_for: Callable[[RunSettings], RunCallback] = lambda settings: RunCallback(),
) -> list[Result]:
    """Run every method of the demo that has no result in `folder/runs` yet.

    Args:
        folder: Where the runs are stored.
        seed: Seed of all runs.
        callback_for: Called before each run; returns the callback of that run.

    Returns:
        The results, in the order of `METHODS`.
    """
    store, results = Store(folder / "runs"), []
    for method in METHODS:
        settings = RunSettings.parse({**SCENARIO, **method, "seed": seed})
        results.append(store.get(settings, callback_for(settings)))
    return results
