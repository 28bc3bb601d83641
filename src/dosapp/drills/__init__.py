"""Deliberate stress of the service: poisoning, crashes, load, floods and bad requests."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_drill(
    name: str, quick: bool, store: Path, on_progress: Callable[[str], None]
) -> dict[str, Any]:
    """Run one drill on a learner of its own in a temporary folder.

    Args:
        name: guards, poison, crash, load, availability or bad-input.
        quick: Fewer repetitions, a few minutes at most.
        store: Where a long drill keeps its parts, so that it can continue when it was stopped.
        on_progress: Called with a message before each part.

    Returns:
        The content of the drill's JSON file.
    """
    from dosapp.drills import availability, bad_input, crash, guards, load, poison

    if name == "guards":
        streams = guards.drill([0] if quick else [0, 1, 2], 1 if quick else 2, None, on_progress)
        return {"outcomes": guards.to_json(streams), "gain_kept": guards.gain_kept(streams)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "learner"
        if name == "poison":
            outcomes = poison.run_scenarios(Path(temporary), store / name, quick, on_progress)
            return poison.to_json(outcomes)
        if name == "crash":
            return crash.drill(folder, 5 if quick else 50, on_progress)
        if name == "availability":
            return availability.drill(folder, 4 if quick else 6, 1 if quick else 2, on_progress)
        if name == "bad-input":
            return bad_input.drill(folder, 240 if quick else 2400, on_progress)
        result = load.drill(folder, 5 if quick else 20, 15 if quick else 300, on_progress)
        return result | {"at_15_percent": load.latency_ratios(result)}
