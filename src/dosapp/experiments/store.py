"""A folder of results, each under the hash of everything that determines it."""

import json
from collections.abc import Iterable
from pathlib import Path

from dosapp.errors import DosappError, InputError
from dosapp.experiments.callbacks import RunCallback
from dosapp.experiments.plan import Plan, plan
from dosapp.experiments.result import Result
from dosapp.experiments.run import run
from dosapp.methods.registry import METHODS
from dosapp.settings import RunSettings


class Store:
    """Results by key: no run is computed twice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run_folder(self, planned: Plan) -> Path:
        """The folder of a run."""
        return self.folder / planned.key

    def has_result(self, settings: RunSettings) -> bool:
        """Whether a run is finished; False also if its data or backbone is not available here."""
        return self._result_file(settings) is not None

    def find_result(self, settings: RunSettings) -> Result | None:
        """The result of a run; None if it is not finished or cannot be looked up here."""
        file = self._result_file(settings)
        return None if file is None else Result.read(file)

    def _result_file(self, settings: RunSettings) -> Path | None:
        if not self.folder.exists():
            return None
        try:
            file = self.run_folder(plan(settings)) / "result.json"
        except DosappError:
            return None
        return file if file.exists() else None

    def get(self, settings: RunSettings, callback: RunCallback | None = None) -> Result:
        """Read the result of a run; compute or resume the run if it is not finished."""
        planned = plan(settings)
        return run(planned, self.run_folder(planned), resume=True, callback=callback)


def read_results(paths: Iterable[Path]) -> list[Result]:
    """Read every `result.json` at or below some paths.

    Args:
        paths: Files, run folders, or folders of runs.

    Returns:
        The results, sorted by method (in the registry's order) and settings.

    Raises:
        InputError: A path does not exist, or there is no result below any of them.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise InputError(f"'{path}' does not exist; give a run folder or a folder of runs")
        files += [path] if path.is_file() else sorted(path.rglob("result.json"))
    if not files:
        raise InputError(f"no result.json below {', '.join(map(str, paths))}")
    return sorted((Result.read(file) for file in dict.fromkeys(files)), key=_sort_key)


def _sort_key(result: Result) -> tuple[object, ...]:
    values, names = result.settings, list(METHODS)
    method = names.index(values["method"]) if values["method"] in names else len(names)
    options = json.dumps(values["options"], sort_keys=True)
    return (
        method,
        values["adapt"] or "",
        options,
        values["stream"],
        json.dumps(values, sort_keys=True),
    )
