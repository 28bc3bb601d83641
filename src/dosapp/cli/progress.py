"""What a person sees while a run goes on: bars and tables on a terminal, plain lines otherwise."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dosapp.experiments.grid import Outcome
from dosapp.experiments.plan import run_label
from dosapp.experiments.run import RunCallback
from dosapp.settings import RunSettings

AHEAD = 2  # rows of a grid that are shown before any of their runs is done
LESSONS = 0.6  # a session's share of the bar that is theirs; the rest is the stream's


@contextmanager
def run_progress(title: str, err: Console) -> Iterator[RunCallback]:
    """Of one run, with the time left."""
    if not err.is_terminal:
        yield Lines(err)
        return
    with Bar(title, err) as bar:
        yield bar


class Lines(RunCallback):
    def __init__(self, err: Console) -> None:
        self.err, self.sessions = err, 0

    def on_begin(self, label: str, sessions: int) -> None:
        self.sessions = sessions
        self.err.print(f"{label}: {sessions} sessions")

    def on_evaluation(self, session: int, row: list[float]) -> None:
        self.err.print(f"  session {session + 1}/{self.sessions}: {_known(row)}")


class Bar(RunCallback):
    def __init__(self, title: str, err: Console) -> None:
        self.bar = Progress(
            TextColumn("{task.description:<22}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=err,
        )
        self.task = self.bar.add_task(title, total=1.0, note="")
        self.sessions = 1

    def __enter__(self) -> "Bar":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def on_begin(self, label: str, sessions: int) -> None:
        self.sessions = sessions
        self.bar.update(self.task, description=label)

    def on_training_step(self, session: int, step: int, of: int, loss: float) -> None:
        self._at(session, LESSONS * step / of, f"session {session + 1}, loss {loss:.2f}")

    def on_stream_step(self, session: int, step: int, of: int) -> None:
        self._at(session, LESSONS + (1 - LESSONS) * step / of, f"session {session + 1}, stream")

    def on_evaluation(self, session: int, row: list[float]) -> None:
        self._at(session, 1.0, _known(row))

    def _at(self, session: int, share: float, note: str) -> None:
        self.bar.update(self.task, completed=(session + share) / self.sessions, note=note)


def _known(row: list[float]) -> str:
    return f"{sum(row) / len(row):.1f} % on {len(row)} task(s)"


@contextmanager
def grid_progress(
    planned: Sequence[RunSettings], err: Console
) -> Iterator[Callable[[Outcome], None]]:
    """A grid as it fills: whoever computes it calls what is given with every outcome."""
    filling = GridTable(planned, err)
    if not err.is_terminal:
        yield filling.line
        return
    with Live(filling.screen(), console=err, refresh_per_second=2) as live:

        def show(outcome: Outcome) -> None:
            filling.add(outcome)
            if outcome.result is None:
                live.console.print(f"{filling.called(outcome.settings)}: {outcome.error}")
            live.update(filling.screen())

        yield show


class GridTable:
    """The outcomes of a grid so far."""

    def __init__(self, planned: Sequence[RunSettings], err: Console) -> None:
        self.planned, self.err = planned, err
        self.done: list[Outcome] = []
        self.several = len({one.data for one in planned}) > 1
        self.names = list(dict.fromkeys(map(self.called, planned)))
        self.bar = Progress(
            TextColumn("runs"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=err,
        )
        self.task = self.bar.add_task("runs", total=len(planned))

    def called(self, one: RunSettings) -> str:
        return f"{run_label(one)}, {one.data}" if self.several else run_label(one)

    def add(self, outcome: Outcome) -> None:
        self.done.append(outcome)
        self.bar.update(self.task, completed=len(self.done))

    def line(self, outcome: Outcome) -> None:
        """For those who read line by line."""
        self.add(outcome)
        found, said = outcome.result, outcome.error
        if found:
            said = f"Acc {_mean([found.metrics['accuracy']])}"
            said += f"  F {_mean([found.metrics['forgetting']])}"
        name = f"{self.called(outcome.settings)}, seed {outcome.settings.seed}"
        self.err.print(f"{len(self.done)}/{len(self.planned)} {name}: {said}")

    def screen(self) -> Group:
        table = Table(box=None, header_style="bold")
        for head in ("run", "done", "Acc", "F", "failed"):
            table.add_column(head, justify="left" if head == "run" else "right")
        last = max((self.names.index(self.called(o.settings)) + 1 for o in self.done), default=0)
        for name in self.names[: last + AHEAD][-(self.err.height - 4) :]:
            mine = [o for o in self.done if self.called(o.settings) == name]
            found = [o.result.metrics for o in mine if o.result]
            table.add_row(
                name,
                f"{len(mine)}/{sum(self.called(one) == name for one in self.planned)}",
                _mean([m["accuracy"] for m in found]),
                _mean([m["forgetting"] for m in found]),
                str(len(mine) - len(found)) if len(found) < len(mine) else "",
            )
        return Group(table, self.bar)


def _mean(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.1f}" if known else "–"
