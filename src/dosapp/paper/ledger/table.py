"""The ledger of one table at one scale, read from a result store. It never runs anything."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dosapp.errors import DosappError, InputError
from dosapp.experiments.grid import parse_seeds
from dosapp.experiments.plan import plan
from dosapp.experiments.result import Result, check_paired
from dosapp.experiments.store import Store
from dosapp.paper.ledger.cells import Cell, read_metric
from dosapp.paper.ledger.verdicts import Verdict, find_uninformative, judge_claim
from dosapp.paper.reproduce import Row, Scale, get_table
from dosapp.runtime.extras import missing_extra
from dosapp.settings import RunSettings

PAPER_WEIGHTS = "CLIP ViT-B/16 with OpenAI's weights"
FORGETTING_DEFINITIONS = {"forgetting": "the paper's formula", "forgetting_spu": "SPU's code"}


class Ledger:
    """A table of the paper beside the stored results of a scale.

    Args:
        name: Name of the table.
        scale: The scale at which it was run.
        folder: The result store.
        measure: Whether missing times may be measured (`TimeLedger` only).
        cache: Results that other ledgers have read, by settings; tables share many rows.
    """

    def __init__(
        self,
        name: str,
        scale: Scale,
        folder: Path,
        measure: bool = False,
        cache: dict[str, Result | None] | None = None,
    ) -> None:
        self.table, self.scale, self.store = get_table(name), scale, Store(folder)
        self.measure = measure
        self.notes: list[str] = []  # rows that are left out, figures that cannot be drawn
        self.unavailable: list[str] = []  # data or backbones without which results are not found
        self._cache = {} if cache is None else cache

    def _results(self, row: Row, data: str) -> dict[int, Result]:
        """The stored results of a row on a dataset, by seed."""
        results: dict[int, Result] = {}
        if reason := self.scale.missing_input(row):
            self.notes.append(reason)
            return results
        for settings in self.scale.runs(row, data):
            key = settings.model_dump_json()
            if key not in self._cache:
                self._cache[key] = self._read_result(settings)
            result = self._cache[key]
            if result is not None:
                results[settings.seed] = result
        return results

    def _read_result(self, settings: RunSettings) -> Result | None:
        try:
            planned = plan(settings)
        except DosappError as error:  # without its data or backbone it was not run here
            self.unavailable.append(str(error))
            return None
        path = self.store.run_folder(planned) / "result.json"
        if not path.exists():
            return None
        result = Result.read(path)
        if (result.key, result.stream["hash"]) != (planned.key, planned.scenario.hash):
            raise InputError(
                f"'{path}' is the result of another run ({result.label}); delete it and run again"
            )
        return result

    def cells(self) -> list[Cell]:
        """Every row × dataset × metric of the table."""
        is_paper, seeds = not self.scale.data, len(parse_seeds(self.scale.seeds))
        return [
            Cell(
                row,
                data,
                metric,
                row.published[data][n] if is_paper else None,
                list(self._results(row, data).values()),
                self.scale.runs(row, data)[0],
                seeds,
                is_paper,
            )
            for row, data in self.scale.rows(self.table)
            for n, metric in enumerate(self.table.metrics)
        ]

    def verdicts(self) -> list[Verdict]:
        """Judge every claim by the differences of results with the same dataset and seed."""
        verdicts = []
        for better, than, metric, *other in self.table.claims:
            other_metric, differences = (other[0] if other else metric), []
            reasons: list[str] = []
            excluded = () if other else self.table.contradicting_datasets(better, than, metric)
            for data in self.scale.datasets(self.table.data):
                if data in excluded:
                    continue
                first = self._results(self.table.row(better), data)
                second = self._results(self.table.row(than), data)
                if reason := self._find_uninformative(data, [*first.values(), *second.values()]):
                    reasons.append(f"{data}: {reason}")
                    continue
                for seed in first.keys() & second.keys():
                    check_paired(first[seed], second[seed])
                    a = read_metric(first[seed], metric)
                    b = read_metric(second[seed], other_metric)
                    if a is not None and b is not None:
                        differences.append(a - b)
            verdict = judge_claim(better, than, metric, differences)
            if reasons and not differences:
                verdict = replace(verdict, outcome="uninformative")
            verdict = replace(verdict, excluded=excluded, uninformative=tuple(reasons))
            if other:  # two metrics of the same row
                verdict = replace(verdict, better=metric, than=other_metric, metric="the mean")
            verdicts.append(verdict)
        return verdicts

    def _find_uninformative(self, data: str, results: Sequence[Result]) -> str:
        """Why a claim cannot be judged on a dataset; empty if it can, or if it is not known."""
        zero_shot, joint = (
            self._results(Row(method, {"method": method}, {}), data)
            for method in ("zero-shot", "joint")
        )
        return find_uninformative(results, zero_shot, joint)

    def forgetting_errors(self) -> dict[str, list[float]]:
        """Our F less the published one by both definitions, one value per row and dataset.

        The paper prints a formula, but its code is SPU's, which has another (docs/readings.md).
        """
        errors: dict[str, list[float]] = {name: [] for name in FORGETTING_DEFINITIONS}
        if "forgetting" not in self.table.metrics:
            return errors
        column = self.table.metrics.index("forgetting")
        for row, data in self.scale.rows(self.table):
            values, results = row.published.get(data), self._results(row, data).values()
            if not values or values[column] is None or not results:
                continue
            ours = {name: [r.metrics.get(name) for r in results] for name in errors}
            for name, seeds in ours.items():
                known = [value for value in seeds if value is not None]
                if known:
                    errors[name].append(float(np.mean(known)) - float(values[column] or 0.0))
        return errors

    def draw_figure(self, path: Path) -> None:
        """Draw the paper's figure or the table's sweeps to `path.png`, `.svg` and `.pdf`."""
        try:
            import matplotlib.pyplot as plt

            from dosapp.report import figures
            from dosapp.report.tables import build_rows
        except ImportError as error:
            self.notes.append(str(missing_extra("a figure", "report", error)))
            return

        rows = build_rows([r for cell in self.cells() for r in cell.results])
        is_map = self.table.kind == "figure"
        plot = figures.plot_forgetting_maps if is_map else figures.plot_sweeps
        figure = plot(rows) if rows else None
        if figure is not None:
            figures.save_figure(figure, path.parent, path.name)
            plt.close(figure)

    def to_dict(self) -> dict[str, Any]:
        """The ledger as it is stored in a JSON file."""
        return {
            "table": self.table.name,
            "title": self.table.title,
            "scale": self.scale.name,
            "note": self.table.note,
            **self.entries(),
            "claims": [verdict.to_dict() for verdict in self.verdicts()],
            "forgetting_errors": self.forgetting_errors(),
        }

    def entries(self) -> dict[str, Any]:
        """The numbers of the ledger, for `to_dict`."""
        return {"cells": [cell.to_dict() for cell in self.cells()]}

    def markdown(self) -> str:
        """The ledger in Markdown."""
        table, cells = self.table, self.cells()
        lines = [f"## {table.title}", ""]
        for note in filter(None, (table.note, self._buffer_note(), self._weights_note(cells))):
            lines += [note, ""]
        for data in self.scale.datasets(table.data):
            head = ["row", *table.metrics, "seeds", "steps on the stream", "status"]
            lines += [f"**{data}**", "", markdown_row(head), markdown_row(["---"] * len(head))]
            for row in table.rows:
                row_cells = [c for c in cells if c.row is row and c.data == data]
                steps = row_cells[0].to_dict()["steps"]
                status = " / ".join(dict.fromkeys(c.status for c in row_cells))
                if row.inconsistent and not self.scale.data:
                    status += f" ({row.inconsistent})"
                values = [row.name, *map(_format_cell, row_cells), str(len(row_cells[0].values))]
                steps_text = " ".join(map(str, steps)) if steps else "–"
                lines.append(markdown_row([*values, steps_text, status]))
            lines.append("")
        return "\n".join([*lines, *self.claim_lines(), *self._provenance_lines(cells), ""])

    def _buffer_note(self) -> str:
        """Rows have the paper's names, though replay buffers are smaller at smaller scales."""
        sizes = (row.settings.get("buffer_size") for row in self.table.rows)
        texts = [f"{n} images is {self.scale.buffer_sizes[n]}" for n in dict.fromkeys(sizes) if n]
        if not texts or not self.scale.data:
            return ""
        return f"A replay buffer of {', one of '.join(texts)} at this scale."

    def _weights_note(self, cells: Sequence[Cell]) -> str:
        """Whose weights the published and our numbers are of, where both are shown."""
        if self.scale.data:
            return ""
        ours = {
            f"{r.backbone['name']} ({r.backbone['fingerprint']})" for c in cells for r in c.results
        }
        return f"Published: {PAPER_WEIGHTS}. Ours: {', '.join(sorted(ours)) or 'not run'}."

    def claim_lines(self) -> Iterator[str]:
        """A table of the claims and verdicts; empty at the paper's scale, which compares cells."""
        if not self.table.claims or not self.scale.data:
            return
        yield markdown_row(["claim of the paper", "our difference", "verdict"])
        yield markdown_row(["---"] * 3)
        datasets = self.scale.datasets(self.table.data)
        for v in self.verdicts():
            gap = "–" if v.difference is None else f"{v.difference:+.1f}"
            gap += "" if v.half_interval is None else f" ± {v.half_interval:.1f} ({v.pairs} pairs)"
            claim = f"{v.better} better than {v.than} in {v.metric.replace('_', ' ')}"
            excluded = [name for name in v.excluded if name in datasets]
            claim += f" (but in the paper not on {' and '.join(excluded)})" if excluded else ""
            outcome = v.outcome + (f" ({'; '.join(v.uninformative)})" if v.uninformative else "")
            yield markdown_row([claim, gap, outcome])
        yield ""

    def _provenance_lines(self, cells: Sequence[Cell]) -> Iterator[str]:
        """The command of each row and where its results come from, in a folded block."""
        seed = parse_seeds(self.scale.seeds)[0]
        yield f"<details><summary>Commands and provenance (seed {seed})</summary>"
        yield ""
        for cell in cells:
            if cell.metric != self.table.metrics[0]:
                continue
            facts = cell.to_dict()
            yield f"- {cell.row.name}, {cell.data}: `{facts['command']}`"
            if cell.results:
                skipped = (
                    f", without {n} unreadable image{'s' * (n > 1)}"
                    if (n := facts["left_out"])
                    else ""
                )
                yield (
                    f"  backbone {facts['backbone']}, streams {' '.join(facts['stream'])}{skipped},"
                    f" {facts['machine']}, {facts['finished']}"
                )
        yield ""
        yield "</details>"


def _format_cell(cell: Cell) -> str:
    if cell.mean is None:
        ours = "–"
    else:
        ours = f"{cell.mean:.1f}" + ("" if cell.std is None else f" ± {cell.std:.1f}")
    if not cell.paper_scale:
        return ours
    gap = "" if cell.difference is None else f", {cell.difference:+.1f}"
    return f"{ours} (paper {'–' if cell.published is None else cell.published}{gap})"


def markdown_row(cells: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"
