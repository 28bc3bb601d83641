"""What a person sees while a run goes on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dosapp.grid import Outcome
from dosapp.plan import label
from dosapp.run import Watch
from dosapp.settings import RunSettings

AHEAD = 2  # rows of a grid that are shown before any of their runs is done


@contextmanager
def progress(title: str, err: Console) -> Iterator[Watch]:
    """A bar with the time left on a terminal, plain lines otherwise."""
    if not err.is_terminal:

        class Lines(Watch):
            sessions = 0

            def begin(self, label: str, sessions: int) -> None:
                self.sessions = sessions
                err.print(f"{label}: {sessions} sessions", highlight=False)

            def measured(self, session: int, row: list[float]) -> None:
                mean = sum(row) / len(row)
                err.print(
                    f"  session {session + 1}/{self.sessions}: {mean:.1f} % on {len(row)} task(s)",
                    highlight=False,
                )

        yield Lines()
        return
    bar = Progress(
        TextColumn("{task.description:<22}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=err,
    )
    with bar:
        task = bar.add_task(title, total=1.0, note="")

        class Bar(Watch):
            sessions = 1

            def begin(self, label: str, sessions: int) -> None:
                self.sessions = sessions
                bar.update(task, description=label)

            def lesson(self, session: int, step: int, of: int, loss: float) -> None:
                self.at(session, 0.6 * step / of, f"session {session + 1}, loss {loss:.2f}")

            def stream(self, session: int, step: int, of: int) -> None:
                self.at(session, 0.6 + 0.4 * step / of, f"session {session + 1}, stream")

            def at(self, session: int, share: float, note: str) -> None:
                bar.update(task, completed=(session + share) / self.sessions, note=note)

            def measured(self, session: int, row: list[float]) -> None:
                self.at(session, 1.0, f"{sum(row) / len(row):.1f} % on {len(row)} task(s)")

        yield Bar()


@contextmanager
def many(planned: Sequence[RunSettings], err: Console) -> Iterator[Callable[[Outcome], None]]:
    """A grid as it fills: a table with the time left on a terminal, a line per run otherwise."""
    done: list[Outcome] = []
    several = len({one.data for one in planned}) > 1

    def called(one: RunSettings) -> str:
        return f"{label(one)}, {one.data}" if several else label(one)

    names = list(dict.fromkeys(map(called, planned)))
    bar = Progress(
        TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=err
    )
    task = bar.add_task("runs", total=len(planned))

    def screen() -> Group:
        table = Table(box=None, header_style="bold")
        for head in ("run", "done", "Acc", "F", "failed"):
            table.add_column(head, justify="left" if head == "run" else "right")
        begun = max((names.index(called(o.settings)) + 1 for o in done), default=0)
        for name in names[: begun + AHEAD][-(err.height - 4) :]:
            mine = [o for o in done if called(o.settings) == name]
            found = [o.result.metrics for o in mine if o.result]
            table.add_row(
                name,
                f"{len(mine)}/{sum(called(one) == name for one in planned)}",
                _mean([m["accuracy"] for m in found]),
                _mean([m["forgetting"] for m in found]),
                str(len(mine) - len(found)) if len(found) < len(mine) else "",
            )
        return Group(table, bar)

    if not err.is_terminal:

        def line(outcome: Outcome) -> None:
            done.append(outcome)
            found, said = outcome.result, outcome.error
            if found:
                said = f"Acc {_mean([found.metrics['accuracy']])}"
                said += f"  F {_mean([found.metrics['forgetting']])}"
            name = f"{called(outcome.settings)}, seed {outcome.settings.seed}"
            err.print(f"{len(done)}/{len(planned)} {name}: {said}", highlight=False)

        yield line
        return
    with Live(screen(), console=err, refresh_per_second=2) as live:

        def show(outcome: Outcome) -> None:
            done.append(outcome)
            bar.update(task, completed=len(done))
            if outcome.result is None:
                live.console.print(f"{called(outcome.settings)}: {outcome.error}", highlight=False)
            live.update(screen())

        yield show


def _mean(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.1f}" if known else "–"
