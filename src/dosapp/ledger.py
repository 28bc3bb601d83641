"""What came out, beside the paper: a ledger of stored results.

A cell is filled from a stored result or not at all. At the paper's scale a number is set against
the paper's, at the smaller ones its claims are.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dosapp.data.known import Known
from dosapp.errors import BadInput
from dosapp.grid import seed_list
from dosapp.plan import plan
from dosapp.reproduce import LOWER, Row, Scale, command, table, timed
from dosapp.result import Result, same_stream
from dosapp.settings import RunSettings
from dosapp.storage import read_json, write_bytes, write_json
from dosapp.store import Store
from dosapp.timing import in_turns

BACKBONE = "ViT-B-16"  # the paper's
REPORT = "pip install 'dosapp[report]'"
# What is called reproduced: a mean as near to the paper's as a point, or as its own 95 % interval
# if that is wider, but two points at most; a ratio of seconds as near as a tenth.
POINT, POINTS, NEAR = 1.0, 2.0, 0.1
# Student's t for a two-sided 95 % interval, by degrees of freedom; beyond them the normal's.
T95 = (
    *(12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13),
    *(2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04),
)


@dataclass(frozen=True)
class Cell:
    """One number of the paper beside ours."""

    row: Row
    data: str
    metric: str
    published: float | None
    results: Sequence[Result]
    settings: RunSettings
    asked: int  # seeds of the scale
    paper_scale: bool

    @cached_property
    def values(self) -> list[float]:
        found = [value_of(result, self.metric, self.row.session) for result in self.results]
        return [value for value in found if value is not None]

    @property
    def mean(self) -> float | None:
        return float(np.mean(self.values)) if self.values else None

    @property
    def std(self) -> float | None:
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    @property
    def status(self) -> str:
        """Only at the paper's scale is a number set against the paper's."""
        if not self.values:
            return "not at this scale" if self.results and self.row.session else "not run"
        if not self.paper_scale:
            return "run"
        if self.foreign:
            return f"run with another {self.foreign}"
        return "not published" if self.difference is None else self._beside(self.difference)

    def _beside(self, difference: float) -> str:
        if self.row.inconsistent:
            return "paper inconsistent"
        if len(self.values) < self.asked:
            return f"run with {len(self.values)} of {self.asked} seeds"
        near = min(POINTS, max(POINT, interval(self.values)))
        return "reproduced" if abs(difference) <= near else "differs"

    @property
    def foreign(self) -> str:
        """What was not the paper's, in any of the results."""
        said = (foreign(self.data, r.backbone["name"], r.tasks) for r in self.results)
        return next(filter(None, said), "")

    @property
    def difference(self) -> float | None:
        """To the paper's, where there is something to compare."""
        if self.published is None or self.mean is None or self.foreign:
            return None
        return self.mean - self.published

    def facts(self) -> dict[str, Any]:
        first = self.results[0] if self.results else None
        return {
            "row": self.row.name,
            "data": self.data,
            "metric": self.metric,
            "paper": self.published,
            "ours": self.mean,
            "std": self.std,
            "difference": self.difference,
            "seeds": len(self.values),
            "status": self.status,
            "note": self.row.inconsistent,
            "command": command(self.settings),
            "stream": [result.stream["hash"] for result in self.results],
            "left_out": max((r.stream.get("left_out", 0) for r in self.results), default=0),
            "steps": first.steps["stream"] if first else None,
            "backbone": first.backbone["fingerprint"] if first else None,
            "machine": " / ".join(dict.fromkeys(r.machine for r in self.results)) or None,
            "finished": max((result.finished for result in self.results), default=None),
        }


def foreign(data: str, backbone: str, tasks: Sequence[Mapping[str, Any]]) -> str:
    """What is not the paper's: pictures by their number, a backbone by its (folder's) name."""
    release = [Known.named(name) for name in data.split("+")]
    taught, asked = (sum(known.images[part] for known in release) for part in ("train", "test"))
    odd = sum(len(known.classes) for known in release)  # halves of a class with an odd number
    tests = sum(task["test"] for task in tasks)
    whole, half = tests == asked, abs(2 * tests - asked) <= odd
    if sum(task["train"] for task in tasks) != taught or not (whole or half):
        return "number of pictures"
    return "" if Path(backbone).name == BACKBONE else "backbone"


def value_of(result: Result, metric: str, session: int | None = None) -> float | None:
    """A metric; `previous_tasks.after` is of one session, or the mean after the first."""
    name, _, part = metric.partition(".")
    if not part:
        return result.metrics.get(name)
    line = getattr(result, name)[part]
    if session is not None:
        return line[session] if session < len(line) else None
    later = [value for value in line[1:] if value is not None]
    return float(np.mean(later)) if later else None


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper, and what our paired differences say of it."""

    better: str
    than: str
    metric: str
    difference: float | None  # better less than, mean over pairs
    half: float | None  # half of its 95 % interval
    pairs: int
    said: str
    besides: tuple[str, ...] = ()  # datasets on which the paper's own numbers say otherwise

    def facts(self) -> dict[str, Any]:
        return {**vars(self), "besides": list(self.besides)}


def interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean."""
    if len(values) < 2:
        return math.inf
    freedom = len(values) - 1
    factor = T95[freedom - 1] if freedom <= len(T95) else 1.96
    return factor * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def judged(better: str, than: str, metric: str, differences: Sequence[float]) -> Verdict:
    """`agrees` or `disagrees` if the 95 % interval of the paired difference leaves out zero."""
    count = len(differences)
    if count < 2:
        only = float(differences[0]) if count else None
        return Verdict(
            better, than, metric, only, None, count, "not run" if not count else "too few"
        )
    mean, half = float(np.mean(differences)), interval(differences)
    right = -mean if metric.partition(".")[0] in LOWER else mean
    said = "within noise" if abs(mean) <= half else ("agrees" if right > 0 else "disagrees")
    return Verdict(better, than, metric, mean, half, count, said)


class Ledger:
    """A table at a scale, read from a store of results. It never runs anything."""

    def __init__(
        self,
        name: str,
        scale: Scale,
        folder: Path,
        measure: bool = False,
        read: dict[str, Result | None] | None = None,
    ) -> None:
        self.table, self.scale, self.store = table(name), scale, Store(folder)
        self.may_measure = measure  # the table of seconds is not made of runs
        self.reasons: list[str] = []  # why rows are left out, or there is no figure
        self.unread: list[str] = []  # why rows could not be looked up
        self._read = {} if read is None else read  # tables share many rows

    def _results(self, row: Row, data: str) -> dict[int, Result]:
        """By seed, those that are there."""
        found: dict[int, Result] = {}
        if reason := self.scale.lacks(row):
            self.reasons.append(reason)
            return found
        for settings in self.scale.runs(row, data):
            key = settings.model_dump_json()
            if key not in self._read:
                self._read[key] = self._stored(settings)
            result = self._read[key]
            if result is not None:
                found[settings.seed] = result
        return found

    def _stored(self, settings: RunSettings) -> Result | None:
        try:
            planned = plan(settings)
        except BadInput as error:  # no data or no backbone here: then it has not been run here
            self.unread.append(str(error))
            return None
        place = self.store.place(planned) / "result.json"
        if not place.exists():
            return None
        found = Result.read(place)
        if (found.key, found.stream["hash"]) != (planned.key, planned.stream.hash):
            raise BadInput(
                f"'{place}' is the result of another run ({found.label}); delete it and run again"
            )
        return found

    def cells(self) -> list[Cell]:
        paper, asked = not self.scale.data, len(seed_list(self.scale.seeds))
        return [
            Cell(
                row,
                data,
                metric,
                row.values[data][n] if paper else None,
                list(self._results(row, data).values()),
                self.scale.runs(row, data)[0],
                asked,
                paper,
            )
            for row, data in self.scale.rows(self.table)
            for n, metric in enumerate(self.table.metrics)
        ]

    def verdicts(self) -> list[Verdict]:
        found = []
        for better, than, metric, *other in self.table.claims:
            against, differences = (other[0] if other else metric), []
            besides = () if other else self.table.contradicted(better, than, metric)
            for data in self.scale.stand_ins(self.table.data):
                if data in besides:
                    continue
                ours = self._results(self.table.row(better), data)
                theirs = self._results(self.table.row(than), data)
                for seed in ours.keys() & theirs.keys():
                    same_stream(ours[seed], theirs[seed])
                    a, b = value_of(ours[seed], metric), value_of(theirs[seed], against)
                    if a is not None and b is not None:
                        differences.append(a - b)
            verdict = replace(judged(better, than, metric, differences), besides=besides)
            if other:  # the same row, two of its numbers
                verdict = replace(verdict, better=metric, than=against, metric="the mean")
            found.append(verdict)
        return found

    def draw(self, place: Path) -> None:
        """The paper's figure, or the numbers a table varies, as PNG, SVG and PDF at the place."""
        try:
            import matplotlib.pyplot as plt

            from dosapp.report import figures
            from dosapp.report.tables import rows
        except ImportError as error:
            self.reasons.append(f"figures need more packages ({error}); {REPORT}")
            return

        found = rows([r for cell in self.cells() for r in cell.results])
        maps = self.table.kind == "figure"
        figure = (figures.forgetting_maps if maps else figures.swept)(found) if found else None
        if figure is not None:
            figures.write(figure, place.parent, place.name)
            plt.close(figure)

    def facts(self) -> dict[str, Any]:
        return {
            "table": self.table.name,
            "title": self.table.title,
            "scale": self.scale.name,
            "note": self.table.note,
            **self.numbers(),
            "claims": [verdict.facts() for verdict in self.verdicts()],
        }

    def numbers(self) -> dict[str, Any]:
        return {"cells": [cell.facts() for cell in self.cells()]}

    def markdown(self) -> str:
        table, cells = self.table, self.cells()
        paper = not self.scale.data
        lines = [f"## {table.title}", ""]
        for note in filter(None, (table.note, self._memories())):
            lines += [note, ""]
        for data in self.scale.stand_ins(table.data):
            head = ["row", *table.metrics, "seeds", "steps on the stream", "status"]
            lines += [f"**{data}**", "", _line(head), _line(["---"] * len(head))]
            for row in table.rows:
                mine = [c for c in cells if c.row is row and c.data == data]
                steps = mine[0].facts()["steps"]
                said = " ".join(map(str, steps)) if steps else "–"
                status = " / ".join(dict.fromkeys(c.status for c in mine))
                status += f" ({row.inconsistent})" if paper and row.inconsistent else ""
                shown = [_shown(c) for c in mine]
                lines.append(_line([row.name, *shown, str(len(mine[0].values)), said, status]))
            lines.append("")
        return "\n".join([*lines, *self._claims(), *self._made(cells), ""])

    def _memories(self) -> str:
        """Rows are called as in the paper, though memories are smaller here."""
        theirs = dict.fromkeys(filter(None, (row.run.get("memory") for row in self.table.rows)))
        said = [f"{n} pictures is one of {self.scale.memory[n]}" for n in theirs]
        return f"A memory of {' and of '.join(said)} here." if said and self.scale.data else ""

    def _claims(self) -> Iterator[str]:
        """At the paper's scale its numbers are set against ours instead."""
        if not self.table.claims or not self.scale.data:
            return
        yield _line(["claim of the paper", "our difference", "verdict"])
        yield _line(["---"] * 3)
        for v in self.verdicts():
            gap = "–" if v.difference is None else f"{v.difference:+.1f}"
            gap += "" if v.half is None else f" ± {v.half:.1f} ({v.pairs} pairs)"
            words = f"{v.better} better than {v.than} in {v.metric.replace('_', ' ')}"
            left = [name for name in v.besides if name in self.scale.stand_ins(self.table.data)]
            words += f" (but in the paper not on {' and '.join(left)})" if left else ""
            yield _line([words, gap, v.said])
        yield ""

    def _made(self, cells: Sequence[Cell]) -> Iterator[str]:
        """How each row came about, folded away."""
        seed = seed_list(self.scale.seeds)[0]
        yield f"<details><summary>How each row was made (seed {seed})</summary>"
        yield ""
        for cell in cells:
            if cell.metric != self.table.metrics[0]:
                continue
            fact = cell.facts()
            yield f"- {cell.row.name}, {cell.data}: `{fact['command']}`"
            if cell.results:
                without = f", without {n} bad picture(s)" if (n := fact["left_out"]) else ""
                yield (
                    f"  backbone {fact['backbone']}, streams {' '.join(fact['stream'])}{without}, "
                    f"{fact['machine']}, {fact['finished']}"
                )
        yield ""
        yield "</details>"


class TimeLedger(Ledger):
    """The table of seconds: measured in turns, in one process, and never a timed test. On another
    machine seconds say nothing, so it is their ratios to DoSAPP's that are set against the paper's.
    """

    def draw(self, place: Path) -> None:
        """There is nothing to draw."""

    @cached_property
    def measured(self) -> dict[str, Any]:
        try:
            found = in_turns(timed(self.scale), self.store.folder, self.may_measure)
        except BadInput as error:
            self.unread.append(str(error))
            found = None
        if found and "tasks" not in found and not self.scale.data:
            found = None  # from before what was learned was written down: it cannot be compared
        return found or {"seconds": {}}

    def times(self) -> list[dict[str, Any]]:
        """A row each: seconds by session, and all of it as a ratio to DoSAPP's."""
        found, ours = self.measured, self.measured["seconds"]
        published = {
            row.name: [value or 0.0 for line in row.values.values() for value in line]
            for row in self.table.rows
        }
        rows, strange = [], ""
        if ours and not self.scale.data:
            data = timed(self.scale)["DoSAPP"].data
            strange = foreign(data, found["backbone"], found["tasks"])
        for name, settings in timed(self.scale).items():
            paper = None if self.scale.data else sum(published[name]) / sum(published["DoSAPP"])
            ratio = sum(ours[name]) / sum(ours["DoSAPP"]) if ours else None
            gap = None if paper is None or ratio is None or strange else ratio - paper
            status = f"run with another {strange}" if strange else "run"
            if gap is not None:
                status = "reproduced" if abs(gap) <= NEAR else "differs"
            rows.append(
                {
                    "row": name,
                    "paper_seconds": None if self.scale.data else published[name],
                    "seconds": ours.get(name),
                    "paper": paper,
                    "ours": ratio,
                    "difference": gap,
                    "status": status if ours else "not run",
                    "command": command(settings),
                    "seeds": 1 if ours else 0,
                    "steps": found.get("steps", {}).get(name),
                    "stream": found.get("streams", {}).get(name),
                    "backbone": found.get("backbones", {}).get(name),
                    "machine": found.get("machine"),
                    "finished": found.get("finished"),
                }
            )
        return rows

    def verdicts(self) -> list[Verdict]:
        """Sessions are the pairs."""
        ours = self.measured["seconds"]
        return [
            judged(a, b, metric, [x - y for x, y in zip(ours[a], ours[b], strict=True)])
            if ours
            else judged(a, b, metric, [])
            for a, b, metric in self.table.claims
        ]

    def numbers(self) -> dict[str, Any]:
        return {"rows": self.times()}

    def markdown(self) -> str:
        rows, ours = self.times(), self.measured["seconds"]
        lines = [f"## {self.table.title}", "", self.table.note, ""]
        lines += [_line(["session", *(row["row"] for row in rows)])]
        lines += [_line(["---"] * (len(rows) + 1))]
        for t, base in enumerate(ours.get("DoSAPP", [])):
            cells = [f"{s[t]:.1f} ({s[t] / base:.2f})" for s in ours.values()]
            lines.append(_line([str(t + 1), *cells]))
        total = [f"{sum(row['seconds']):.1f} ({row['ours']:.2f})" for row in rows if ours]
        lines.append(_line(["all", *(total or ["–"] * len(rows))]))
        if not self.scale.data:
            lines.append(_line(["paper", *(f"({row['paper']:.2f})" for row in rows)]))
        lines.append(_line(["status", *(row["status"] for row in rows)]))
        return "\n".join([*lines, "", *self._claims(), *self._made_in_turns(rows), ""])

    def _made_in_turns(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        for row in rows:
            yield f"- {row['row']}: `{row['command']}`"
        if rows[0]["finished"]:
            streams = " ".join(dict.fromkeys(row["stream"] for row in rows))
            first = rows[0]
            yield (
                f"- backbone {first['backbone']}, streams {streams}, "
                f"{first['machine']}, {first['finished']}"
            )


def lost(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> int:
    """Cells of some ledgers that were filled from more seeds than they are now."""

    def seeds(books: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], int]:
        return {
            (book["table"], cell["row"], cell.get("data"), cell.get("metric")): cell.get("seeds", 1)
            for book in books
            for cell in book.get("cells", book.get("rows", []))
            if cell["ours"] is not None
        }

    now = seeds(new)
    return sum(count > now.get(cell, 0) for cell, count in seeds(old).items())


def opened(names: Sequence[str], scale: Scale, folder: Path, measure: bool = False) -> list[Ledger]:
    """The ledgers of some tables, each result read once."""
    read: dict[str, Result | None] = {}
    kinds = [TimeLedger if table(name).kind == "time" else Ledger for name in names]
    return [kind(n, scale, folder, measure, read) for kind, n in zip(kinds, names, strict=True)]


def markdown(books: Sequence[Ledger]) -> str:
    return "\n".join(book.markdown() for book in books)


def write(books: Sequence[Ledger], place: Path) -> None:
    """`.md` and `.json`, but never instead of ones that were filled from more."""
    facts, listing = [book.facts() for book in books], place.with_suffix(".json")
    fewer = lost(read_json(listing), facts) if listing.exists() else 0
    if fewer:
        raise BadInput(
            f"{listing} stays as it is, since {fewer} of its cells would have fewer seeds now; "
            "give the data and settings it was made with, or another --out"
        )
    write_json(listing, facts)
    write_bytes(place.with_suffix(".md"), markdown(books).encode())


def _shown(cell: Cell) -> str:
    if cell.mean is None:
        ours = "–"
    else:
        ours = f"{cell.mean:.1f}" + ("" if cell.std is None else f" ± {cell.std:.1f}")
    if not cell.paper_scale:
        return ours
    gap = "" if cell.difference is None else f", {cell.difference:+.1f}"
    return f"{ours} (paper {'–' if cell.published is None else cell.published}{gap})"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
