"""The table of seconds: measured in turns, in one process, and never a timed test.

On another machine seconds say nothing, so it is their ratios to DoSAPP's that are set against the
paper's.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dosapp.errors import InputError
from dosapp.experiments.costs import time_sessions
from dosapp.paper.ledger.cells import foreign
from dosapp.paper.ledger.table import Ledger, line
from dosapp.paper.ledger.verdicts import Verdict, judge_claim
from dosapp.paper.reproduce import command, timed_runs

NEAR = 0.1  # a ratio that is as near to the paper's is called reproduced


class TimeLedger(Ledger):
    def draw(self, place: Path) -> None:
        """There is nothing to draw."""

    @cached_property
    def measured(self) -> dict[str, Any]:
        try:
            found = time_sessions(timed_runs(self.scale), self.store.folder, self.may_measure)
        except InputError as error:
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
            data = timed_runs(self.scale)["DoSAPP"].data
            strange = foreign(data, found["backbone"], found["tasks"])
        for name, settings in timed_runs(self.scale).items():
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
            judge_claim(a, b, metric, [x - y for x, y in zip(ours[a], ours[b], strict=True)])
            if ours
            else judge_claim(a, b, metric, [])
            for a, b, metric in self.table.claims
        ]

    def numbers(self) -> dict[str, Any]:
        return {"rows": self.times()}

    def markdown(self) -> str:
        rows, ours = self.times(), self.measured["seconds"]
        lines = [f"## {self.table.title}", "", self.table.note, ""]
        lines += [line(["session", *(row["row"] for row in rows)])]
        lines += [line(["---"] * (len(rows) + 1))]
        for t, base in enumerate(ours.get("DoSAPP", [])):
            cells = [f"{s[t]:.1f} ({s[t] / base:.2f})" for s in ours.values()]
            lines.append(line([str(t + 1), *cells]))
        total = [f"{sum(row['seconds']):.1f} ({row['ours']:.2f})" for row in rows if ours]
        lines.append(line(["all", *(total or ["–"] * len(rows))]))
        if not self.scale.data:
            lines.append(line(["paper", *(f"({row['paper']:.2f})" for row in rows)]))
        lines.append(line(["status", *(row["status"] for row in rows)]))
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
