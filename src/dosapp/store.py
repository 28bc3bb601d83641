"""Results under a hash of everything that determines them: no run is computed twice."""

from collections.abc import Iterable
from pathlib import Path

from dosapp.backbones.clip import load as load_backbone
from dosapp.errors import BadInput
from dosapp.methods import build
from dosapp.result import Result
from dosapp.run import Watch, identity, open_stream, run
from dosapp.settings import RunSettings, key_of


def key(settings: RunSettings) -> str:
    """Where a run's result belongs. Needs the stream, not a single step of learning."""
    net = load_backbone(settings.backbone)
    stream = open_stream(settings, net)
    if build(settings.method, settings.adapt, settings.options).joint:
        stream = stream.joint()
    return key_of(identity(settings, stream, net.fingerprint()))


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self, settings: RunSettings) -> Path:
        return self.folder / key(settings)

    def get(self, settings: RunSettings, watch: Watch | None = None) -> Result:
        """The result, computed if it is missing and finished if it is half there."""
        return run(settings, self.place(settings), resume=True, watch=watch)


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
