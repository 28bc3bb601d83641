"""A table at a scale, read from a store of results. It never runs anything."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dosapp.errors import DosappError, InputError
from dosapp.experiments.grid import seed_list
from dosapp.experiments.plan import plan
from dosapp.experiments.result import Result, check_paired
from dosapp.experiments.store import Store
from dosapp.paper.ledger.cells import Cell, value_of
from dosapp.paper.ledger.verdicts import Verdict, judge_claim
from dosapp.paper.reproduce import Row, Scale, table
from dosapp.runtime.extras import missing_extra
from dosapp.settings import RunSettings


class Ledger:
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
        if reason := self.scale.missing_input(row):
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
        except DosappError as error:  # no data or no backbone here: then it has not been run here
            self.unread.append(str(error))
            return None
        place = self.store.place(planned) / "result.json"
        if not place.exists():
            return None
        found = Result.read(place)
        if (found.key, found.stream["hash"]) != (planned.key, planned.scenario.hash):
            raise InputError(
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
            for data in self.scale.datasets(self.table.data):
                if data in besides:
                    continue
                ours = self._results(self.table.row(better), data)
                theirs = self._results(self.table.row(than), data)
                for seed in ours.keys() & theirs.keys():
                    check_paired(ours[seed], theirs[seed])
                    a, b = value_of(ours[seed], metric), value_of(theirs[seed], against)
                    if a is not None and b is not None:
                        differences.append(a - b)
            verdict = replace(judge_claim(better, than, metric, differences), besides=besides)
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
            self.reasons.append(str(missing_extra("a figure", "report", error)))
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
        for data in self.scale.datasets(table.data):
            head = ["row", *table.metrics, "seeds", "steps on the stream", "status"]
            lines += [f"**{data}**", "", line(head), line(["---"] * len(head))]
            for row in table.rows:
                mine = [c for c in cells if c.row is row and c.data == data]
                steps = mine[0].facts()["steps"]
                said = " ".join(map(str, steps)) if steps else "–"
                status = " / ".join(dict.fromkeys(c.status for c in mine))
                status += f" ({row.inconsistent})" if paper and row.inconsistent else ""
                shown = [_shown(c) for c in mine]
                lines.append(line([row.name, *shown, str(len(mine[0].values)), said, status]))
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
        yield line(["claim of the paper", "our difference", "verdict"])
        yield line(["---"] * 3)
        for v in self.verdicts():
            gap = "–" if v.difference is None else f"{v.difference:+.1f}"
            gap += "" if v.half is None else f" ± {v.half:.1f} ({v.pairs} pairs)"
            words = f"{v.better} better than {v.than} in {v.metric.replace('_', ' ')}"
            left = [name for name in v.besides if name in self.scale.datasets(self.table.data)]
            words += f" (but in the paper not on {' and '.join(left)})" if left else ""
            yield line([words, gap, v.said])
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


def _shown(cell: Cell) -> str:
    if cell.mean is None:
        ours = "–"
    else:
        ours = f"{cell.mean:.1f}" + ("" if cell.std is None else f" ± {cell.std:.1f}")
    if not cell.paper_scale:
        return ours
    gap = "" if cell.difference is None else f", {cell.difference:+.1f}"
    return f"{ours} (paper {'–' if cell.published is None else cell.published}{gap})"


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
