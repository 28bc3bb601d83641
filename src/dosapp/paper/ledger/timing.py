"""The ledger of the table of times, which are measured in turns inside one process.

Seconds of another machine cannot be compared, so ratios to DoSAPP are compared with the paper's.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dosapp.errors import DosappError
from dosapp.experiments.costs import time_sessions
from dosapp.paper.ledger.cells import find_mismatch
from dosapp.paper.ledger.table import Ledger, markdown_row
from dosapp.paper.ledger.verdicts import Verdict, judge_claim
from dosapp.paper.reproduce import format_command, list_timed_runs

TOLERANCE = 0.1  # difference of ratios up to which they are called reproduced


class TimeLedger(Ledger):
    """Seconds per session, and their ratios to DoSAPP's."""

    def draw_figure(self, path: Path) -> None:
        """Draw nothing: the table has no figure."""

    @cached_property
    def measured(self) -> dict[str, Any]:
        """The stored times; `seconds` is empty if there are none."""
        try:
            times = time_sessions(list_timed_runs(self.scale), self.store.folder, self.measure)
        except DosappError as error:
            self.unavailable.append(str(error))
            times = None
        if times and "tasks" not in times and not self.scale.data:
            times = None  # an old file without image counts cannot be compared with the paper
        return times or {"seconds": {}}

    def time_rows(self) -> list[dict[str, Any]]:
        """One dictionary per row: seconds by session, and the ratio of the sums to DoSAPP's."""
        times, seconds = self.measured, self.measured["seconds"]
        runs = list_timed_runs(self.scale)
        published = {
            row.name: [value or 0.0 for values in row.published.values() for value in values]
            for row in self.table.rows
        }
        rows, mismatch = [], ""
        if seconds and not self.scale.data:
            mismatch = find_mismatch(runs["DoSAPP"].data, times["backbone"], times["tasks"])
        for name, settings in runs.items():
            paper = None if self.scale.data else sum(published[name]) / sum(published["DoSAPP"])
            ratio = sum(seconds[name]) / sum(seconds["DoSAPP"]) if seconds else None
            gap = None if paper is None or ratio is None or mismatch else ratio - paper
            status = f"run with another {mismatch}" if mismatch else "run"
            if gap is not None:
                status = "reproduced" if abs(gap) <= TOLERANCE else "differs"
            rows.append(
                {
                    "row": name,
                    "paper_seconds": None if self.scale.data else published[name],
                    "seconds": seconds.get(name),
                    "paper": paper,
                    "ours": ratio,
                    "difference": gap,
                    "status": status if seconds else "not run",
                    "command": format_command(settings),
                    "seeds": 1 if seconds else 0,
                    "steps": times.get("steps", {}).get(name),
                    "stream": times.get("streams", {}).get(name),
                    "backbone": times.get("backbones", {}).get(name),
                    "machine": times.get("machine"),
                    "finished": times.get("finished"),
                }
            )
        return rows

    def verdicts(self) -> list[Verdict]:
        """Judge every claim; the sessions are the pairs."""
        seconds = self.measured["seconds"]
        return [
            judge_claim(a, b, metric, [x - y for x, y in zip(seconds[a], seconds[b], strict=True)])
            if seconds
            else judge_claim(a, b, metric, [])
            for a, b, metric in self.table.claims
        ]

    def entries(self) -> dict[str, Any]:
        """The numbers of the ledger, for `to_dict`."""
        return {"rows": self.time_rows()}

    def markdown(self) -> str:
        """The ledger in Markdown."""
        rows, seconds = self.time_rows(), self.measured["seconds"]
        lines = [f"## {self.table.title}", "", self.table.note, ""]
        lines += [markdown_row(["session", *(row["row"] for row in rows)])]
        lines += [markdown_row(["---"] * (len(rows) + 1))]
        for t, base in enumerate(seconds.get("DoSAPP", [])):
            cells = [f"{s[t]:.1f} ({s[t] / base:.2f})" for s in seconds.values()]
            lines.append(markdown_row([str(t + 1), *cells]))
        total = [f"{sum(row['seconds']):.1f} ({row['ours']:.2f})" for row in rows if seconds]
        lines.append(markdown_row(["all", *(total or ["–"] * len(rows))]))
        if not self.scale.data:
            lines.append(markdown_row(["paper", *(f"({row['paper']:.2f})" for row in rows)]))
        lines.append(markdown_row(["status", *(row["status"] for row in rows)]))
        return "\n".join([*lines, "", *self.claim_lines(), *_provenance_lines(rows), ""])


def _provenance_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        yield f"- {row['row']}: `{row['command']}`"
    first = rows[0]
    if first["finished"]:
        streams = " ".join(dict.fromkeys(row["stream"] for row in rows))
        yield (
            f"- backbone {first['backbone']}, streams {streams}, "
            f"{first['machine']}, {first['finished']}"
        )
