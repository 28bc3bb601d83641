"""Results under a hash of everything that determines them: no run is computed twice."""

from collections.abc import Iterable
from pathlib import Path

from dosapp.errors import BadInput
from dosapp.plan import Plan, plan
from dosapp.result import Result
from dosapp.run import Watch, run
from dosapp.settings import RunSettings


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self, planned: Plan) -> Path:
        return self.folder / planned.key

    def get(self, settings: RunSettings, watch: Watch | None = None) -> Result:
        """The result, computed if it is missing and finished if it is half there."""
        planned = plan(settings)
        return run(planned, self.place(planned), resume=True, watch=watch)


def results(places: Iterable[Path]) -> list[Result]:
    """Every result at or below these places, in the order of their paths."""
    found: list[Path] = []
    for place in places:
        if not place.exists():
            raise BadInput(f"'{place}' does not exist; give a run folder or a folder of runs")
        found += [place] if place.is_file() else sorted(place.rglob("result.json"))
    if not found:
        raise BadInput(f"no result.json below {', '.join(map(str, places))}")
    return [Result.read(path) for path in dict.fromkeys(found)]
