"""Results under a hash of everything that determines them: no run is computed twice."""

import json
from collections.abc import Iterable
from pathlib import Path

from dosapp.errors import InputError
from dosapp.experiments.plan import Plan, plan
from dosapp.experiments.result import Result
from dosapp.experiments.run import RunCallback, run
from dosapp.methods.registry import METHODS
from dosapp.settings import RunSettings


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self, planned: Plan) -> Path:
        return self.folder / planned.key

    def get(self, settings: RunSettings, watch: RunCallback | None = None) -> Result:
        """The result, computed if it is missing and finished if it is half there."""
        planned = plan(settings)
        return run(planned, self.place(planned), resume=True, watch=watch)


def read_results(places: Iterable[Path]) -> list[Result]:
    """Every result at or below these places, in the registry's order of methods."""
    found: list[Path] = []
    for place in places:
        if not place.exists():
            raise InputError(f"'{place}' does not exist; give a run folder or a folder of runs")
        found += [place] if place.is_file() else sorted(place.rglob("result.json"))
    if not found:
        raise InputError(f"no result.json below {', '.join(map(str, places))}")
    return sorted((Result.read(path) for path in dict.fromkeys(found)), key=_rank)


def _rank(result: Result) -> tuple[object, ...]:
    said = result.settings
    options = json.dumps(said["options"], sort_keys=True)
    place = list(METHODS).index(said["method"]) if said["method"] in METHODS else len(METHODS)
    return place, said["adapt"] or "", options, said["stream"], json.dumps(said, sort_keys=True)
