"""The paper's tables as runs of this package.

`paper/tables.yaml` says which run makes each row and what was published; `paper/scales/` says at
what size.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dosapp.backbones.registry import resolve_lr
from dosapp.errors import unknown_name
from dosapp.experiments.grid import seed_list
from dosapp.settings import RunSettings, read_yaml

PAPER = Path(__file__).parent
LOWER = ("forgetting", "seconds")  # metrics of which less is better


@dataclass(frozen=True)
class Row:
    """One row of a table: the run that makes it, and the published values by dataset."""

    name: str
    run: Mapping[str, Any]
    values: Mapping[str, Sequence[float | None]]
    session: int | None = None  # the row is about this session alone
    inconsistent: str = ""


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    data: Sequence[str]
    metrics: Sequence[str]
    rows: Sequence[Row]
    claims: Sequence[Sequence[str]] = ()
    note: str = ""
    kind: str = "table"  # or figure, drawn from the same results; or time, measured apart

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def contradicted(self, better: str, than: str, metric: str) -> tuple[str, ...]:
        """Datasets on which the published numbers do not say what the text claims of all."""
        if metric not in self.metrics:
            return ()
        n, sign = self.metrics.index(metric), -1 if metric in LOWER else 1
        first, second = self.row(better).values, self.row(than).values
        found = []
        for data in first.keys() & second.keys():
            a, b = first[data][n], second[data][n]
            if a is not None and b is not None and sign * (a - b) < 0:
                found.append(data)
        return tuple(sorted(found))


def tables() -> dict[str, Table]:
    found = yaml.safe_load((PAPER / "tables.yaml").read_text())
    return {
        name: Table(name, **{**said, "rows": [Row(**row) for row in said["rows"]]})
        for name, said in found.items()
    }


def table(name: str) -> Table:
    known = tables()
    if name not in known:
        raise unknown_name("table", name, known, "dosapp reproduce --list")
    return known[name]


@dataclass(frozen=True)
class Scale:
    """How large: which data stands for the paper's, and the settings every run shares."""

    name: str
    seeds: str
    settings: Mapping[str, Any]
    memory: Mapping[int, int]
    references: str = ""
    data: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by data, method
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # what each has its own

    @classmethod
    def named(cls, name: str) -> "Scale":
        known = [file.stem for file in (PAPER / "scales").glob("*.yaml")]
        if name not in known:
            raise unknown_name("scale", name, known)
        return cls(name, **read_yaml(PAPER / "scales" / f"{name}.yaml"))

    def datasets(self, data: Sequence[str]) -> Sequence[str]:
        """The datasets that are run; at the paper's scale, the paper's."""
        if not self.data:
            return data
        return self.data["long" if any("+" in name for name in data) else "single"]

    def rows(self, table: Table) -> Iterator[tuple[Row, str]]:
        """Every row on every dataset."""
        for row in table.rows:
            for data in self.datasets(table.data):
                yield row, data

    def missing_input(self, row: Row) -> str:
        """What has to be given before a row can be run."""
        if "references" not in row.run.get("options", {}) or self.references:
            return ""
        return (
            f"row '{row.name}' needs reference pictures with captions and is left out; "
            "give --references, a dataset, folder or CSV"
        )

    def runs(self, row: Row, data: str) -> list[RunSettings]:
        """The same run for every seed."""
        method = row.run["method"]
        own = dict(self.methods.get(method, {}))
        if method in self.rates.get(data, {}):
            own["lr"] = self.rates[data][method]
        values = {**self.settings, **own, **row.run, "data": data}
        if values.get("memory"):
            values["memory"] = self.memory[values["memory"]]
        if "references" in values.get("options", {}):
            values["options"] = {**values["options"], "references": self.references}
        seeds = seed_list(self.seeds)
        return [RunSettings.parse({**values, "seed": seed}) for seed in seeds]


def runs(names: Sequence[str], scale: Scale) -> list[RunSettings]:
    """Every run the tables need, each once, a whole table early. Seconds are not made of runs."""
    found: dict[str, RunSettings] = {}
    for name in names:
        for row, data in scale.rows(table(name)):
            if table(name).kind != "time" and not scale.missing_input(row):
                found |= {one.model_dump_json(): one for one in scale.runs(row, data)}
    return sorted(found.values(), key=lambda one: one.seed)


def timed_runs(scale: Scale) -> dict[str, RunSettings]:
    """The runs whose sessions take turns in the table of seconds, by row."""
    known = table("time")
    data = scale.datasets(known.data)[0]
    return {row.name: scale.runs(row, data)[0] for row in known.rows}


def command(settings: RunSettings) -> str:
    """What to type to get this run: everything that is not the default, and the rate in force."""
    usual, words = RunSettings(), ["dosapp", "run"]
    settings = resolve_lr(settings)
    for name, value in settings.model_dump(mode="json").items():
        if value == getattr(usual, name) or name == "options":
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    for name, value in settings.options.items():
        words += ["--set", f"{name}={value}"]
    return shlex.join(words)
