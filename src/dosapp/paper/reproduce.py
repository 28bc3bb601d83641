"""The paper's tables as runs of this package.

`tables.yaml` defines the run behind each row and the published values, `scales/` the data, the
backbone and the sizes with which they are run.
"""

import math
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dosapp.errors import DosappError, unknown_name
from dosapp.experiments.costs import time_sessions
from dosapp.experiments.grid import parse_seeds, row_key
from dosapp.experiments.plan import resolve_training
from dosapp.runtime.files import read_json
from dosapp.settings import RunSettings, read_yaml

PAPER = Path(__file__).parent
LOWER_IS_BETTER = ("forgetting", "seconds")


@dataclass(frozen=True)
class Row:
    """One row of a table: the settings of its run, and the published values by dataset."""

    name: str
    settings: Mapping[str, Any]
    published: Mapping[str, Sequence[float | None]]  # one value per metric of the table
    session: int | None = None  # the row shows this session only
    inconsistent: str = ""  # why the published values cannot be compared
    rate_of: str = ""  # the method whose learning rate it has, if not its own


@dataclass(frozen=True)
class Table:
    """A table or figure of the paper, and the claims that are checked with it."""

    name: str
    title: str
    data: Sequence[str]
    metrics: Sequence[str]
    rows: Sequence[Row]
    claims: Sequence[Sequence[str]] = ()  # better row, worse row, metric, and perhaps another one
    note: str = ""
    kind: str = "table"  # or "figure", drawn from the same results; or "time", timed separately

    def row(self, name: str) -> Row:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)

    def contradicting_datasets(self, better: str, than: str, metric: str) -> tuple[str, ...]:
        """Datasets on which the published numbers contradict a claim."""
        if metric not in self.metrics:
            return ()
        n, sign = self.metrics.index(metric), -1 if metric in LOWER_IS_BETTER else 1
        first, second = self.row(better).published, self.row(than).published
        datasets = []
        for data in first.keys() & second.keys():
            a, b = first[data][n], second[data][n]
            if a is not None and b is not None and sign * (a - b) < 0:
                datasets.append(data)
        return tuple(sorted(datasets))


def load_tables() -> dict[str, Table]:
    """Read all tables of the paper from `tables.yaml`.

    Example:
        >>> load_tables()["main"].row("DoSAPP").published["gtsrb"]
        [72.33, 1.02]
    """
    tables = yaml.safe_load((PAPER / "tables.yaml").read_text())
    return {
        name: Table(name, **{**values, "rows": [Row(**row) for row in values["rows"]]})
        for name, values in tables.items()
    }


def get_table(name: str) -> Table:
    """Look up a table by name.

    Raises:
        InputError: There is no such table.
    """
    known = load_tables()
    if name not in known:
        raise unknown_name("table", name, known, "dosapp reproduce --list")
    return known[name]


@dataclass(frozen=True)
class Scale:
    """A size at which the tables are run: data, backbone, and the settings that all runs share."""

    name: str
    seeds: str
    settings: Mapping[str, Any]
    buffer_sizes: Mapping[int, int]  # replay buffer in the paper → at this scale
    references: str = ""  # images with captions for ZSCL
    data: Mapping[str, Sequence[str]] = field(default_factory=dict)  # empty: the paper's datasets
    learning_rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # data → method
    method_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    data_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def from_name(cls, name: str) -> "Scale":
        """Read a scale from `scales/NAME.yaml`.

        Raises:
            InputError: There is no such scale.

        Example:
            >>> Scale.from_name("tiny").seeds
            '0-2'
        """
        known = [file.stem for file in (PAPER / "scales").glob("*.yaml")]
        if name not in known:
            raise unknown_name("scale", name, known)
        return cls(name, **read_yaml(PAPER / "scales" / f"{name}.yaml"))

    def datasets(self, data: Sequence[str]) -> Sequence[str]:
        """The datasets that stand for the paper's at this scale."""
        if not self.data:
            return data
        return self.data["long" if any("+" in name for name in data) else "single"]

    def rows(self, table: Table) -> Iterator[tuple[Row, str]]:
        """Every row with every dataset."""
        for row in table.rows:
            for data in self.datasets(table.data):
                yield row, data

    def missing_input(self, row: Row) -> str:
        """The reason why a row cannot be run; empty if it can."""
        if "ref_dataset" not in row.settings.get("options", {}) or self.references:
            return ""
        return (
            f"row '{row.name}' needs reference images with captions and is left out; "
            "give --references, a dataset, folder or CSV"
        )

    def runs(self, row: Row, data: str) -> list[RunSettings]:
        """The runs of a row on a dataset, one per seed."""
        method = row.settings["method"]
        own = {**self.data_settings.get(data, {}), **self.method_settings.get(method, {})}
        rate_of = row.rate_of or method
        if rate_of in self.learning_rates.get(data, {}):
            own["lr"] = self.learning_rates[data][rate_of]
        elif row.rate_of:
            plain = RunSettings.parse({**self.settings, "method": rate_of, "data": data})
            own["lr"] = resolve_training(plain).lr
        values = {**self.settings, **own, **row.settings, "data": data}
        if values.get("buffer_size"):
            values["buffer_size"] = self.buffer_sizes[values["buffer_size"]]
        if "ref_dataset" in values.get("options", {}):
            values["options"] = {**values["options"], "ref_dataset": self.references}
        seeds = parse_seeds(self.seeds)
        return [RunSettings.parse({**values, "seed": seed}) for seed in seeds]


def list_runs(names: Sequence[str], scale: Scale) -> list[RunSettings]:
    """List every run that the tables need, each once, sorted by seed.

    Args:
        names: Names of tables. A table of times has no runs: see `list_timed_runs`.
        scale: The scale.

    Returns:
        The settings of the runs.
    """
    planned: dict[str, RunSettings] = {}
    for table in map(get_table, names):
        for row, data in scale.rows(table):
            if table.kind != "time" and not scale.missing_input(row):
                planned |= {run.model_dump_json(): run for run in scale.runs(row, data)}
    return sorted(planned.values(), key=lambda run: run.seed)


def list_timed_runs(scale: Scale) -> dict[str, RunSettings]:
    """The runs whose sessions are timed in turns, by row."""
    table = get_table("time")
    data = scale.datasets(table.data)[0]
    return {row.name: scale.runs(row, data)[0] for row in table.rows}


def check_stored(
    names: Sequence[str], scale: Scale, folder: Path
) -> list[tuple[RunSettings, bool]]:
    """List every run that the tables need, timed ones included, and whether it is stored.

    Args:
        names: Names of tables.
        scale: The scale.
        folder: The result store; it need not exist.

    Returns:
        Settings, and whether a result of them is in the store. Settings are compared, so that
        neither data nor backbone is loaded; a run is computed again if these have changed.
    """
    timed = list_timed_runs(scale) if "time" in names else {}
    files = folder.glob("*/result.json")
    known = {(s["seed"], row_key(s)) for file in files if (s := _stored(file))}

    def is_stored(run: RunSettings) -> bool:
        return (run.seed, row_key(resolve_training(run).model_dump(mode="json"))) in known

    stored = [(run, is_stored(run)) for run in list_runs(names, scale)]
    with warnings.catch_warnings(action="ignore"):  # they are shown when a run is computed
        is_timed = bool(timed) and any(folder.glob("time-*.json"))
        try:
            is_timed = is_timed and time_sessions(timed, folder, measure=False) is not None
        except DosappError:
            is_timed = False
    return stored + [(run, is_timed) for run in timed.values()]


def _stored(path: Path) -> dict[str, Any]:
    """The settings of a stored result; empty if the file cannot be read."""
    try:
        return dict(read_json(path)["settings"])
    except (DosappError, KeyError, TypeError, ValueError):
        return {}


def format_command(settings: RunSettings) -> str:
    """The command line of a run: everything that is not a default, and the learning rate.

    Numbers are printed exactly, so that the command has the same key as the settings.

    Example:
        >>> format_command(RunSettings(method="spu", lr=0.123456789, options={"sparsity": 0.3}))
        'dosapp run --method spu --lr 0.123456789 --set sparsity=0.3'
    """
    arguments, settings = ["dosapp", "run"], resolve_training(settings)
    defaults = resolve_training(RunSettings(data=settings.data)).model_copy(
        update={"data": RunSettings().data, "lr": None}
    )
    for name, value in settings.model_dump(mode="json", exclude={"options"}).items():
        if value == getattr(defaults, name):
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            arguments += [flag, str(value)]
    for name, value in settings.options.items():
        text = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
        arguments += ["--set", f"{name}=" + text.removesuffix("...\n").strip()]
    return shlex.join(arguments)
