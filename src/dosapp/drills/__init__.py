"""Trying the service's promises on purpose: harmful streams, crashes, load and bad requests."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_drill(name: str, quick: bool, watch: Callable[[str], None]) -> dict[str, Any]:
    """One drill, on a learner of its own in a temporary folder."""
    from dosapp.drills import bad_input, crash, guards, load

    if name == "guards":
        outcomes = guards.drill([0] if quick else [0, 1, 2], passes=1 if quick else 2, watch=watch)
        return {"outcomes": guards.facts(outcomes), "gain_kept": guards.kept(outcomes)}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "learner"
        if name == "crash":
            return crash.drill(folder, 5 if quick else 50, watch)
        if name == "bad-input":
            return bad_input.drill(folder, 240 if quick else 2400, watch)
        found = load.drill(folder, 5 if quick else 20, 15 if quick else 300, watch)
        return found | {"at_15_percent": load.ratios(found)}
