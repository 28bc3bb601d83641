"""Progress of runs and grids: bars and tables on a terminal, plain lines otherwise."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dosapp.experiments.callbacks import Phase, RunCallback
from dosapp.experiments.grid import Outcome
from dosapp.experiments.identity import run_label
from dosapp.runtime.plural import plural
from dosapp.settings import RunSettings

PENDING_ROWS = 2  # rows of a grid that are shown before any of their runs is finished
LABELLED_SHARE = 0.6  # share of a session's part of the bar; the rest is the stream's


@contextmanager
def run_progress(title: str, err: Console) -> Iterator["RunProgress"]:
    """Show the progress of one run.

    Args:
        title: Shown until the run's label is known.
        err: Where to print.

    Yields:
        The callback to give to the run.
    """
    if not err.is_terminal:
        yield ProgressLines(err)
        return
    with ProgressBar(title, err) as bar:
        yield bar


PHASES: dict[Phase, str] = {"learn": "labelled phase", "adapt": "stream"}


class RunProgress(RunCallback):
    """Knows where a run is, and says where it continues."""

    def __init__(self, err: Console) -> None:
        self.err, self.sessions, self.position = err, 1, ""

    def describe_position(self) -> str:
        """Where the run is, for a user who stops it."""
        return f"at {self.position}" if self.position else "before its first step"

    def on_begin(self, label: str, sessions: int) -> None:
        """Count the sessions."""
        self.sessions = sessions

    def on_resume(self, session: int, phase: Phase, step: int) -> None:
        """Say where the run continues."""
        if session < self.sessions:
            self._set_position(session, phase, step)
            self.err.print(f"  continues at {self.position}")

    def on_training_step(self, session: int, step: int, total: int, loss: float) -> None:
        """Note the step."""
        self._set_position(session, "learn", step, f" of {total}")

    def on_stream_step(self, session: int, step: int, total: int) -> None:
        """Note the step."""
        self._set_position(session, "adapt", step, f" of {total}")

    def _set_position(self, session: int, phase: Phase, step: int, total: str = "") -> None:
        where = f"session {session + 1} of {self.sessions}"
        self.position = f"{where}, {PHASES[phase]}, after step {step}{total}"


class ProgressLines(RunProgress):
    """One line per session, for logs."""

    def on_begin(self, label: str, sessions: int) -> None:
        """Print the label."""
        super().on_begin(label, sessions)
        self.err.print(f"{label}: {plural(sessions, 'session')}")

    def on_evaluation(self, session: int, accuracies: list[float]) -> None:
        """Print the mean accuracy."""
        self.err.print(f"  session {session + 1}/{self.sessions}: {_format_mean(accuracies)}")


class ProgressBar(RunProgress):
    """A bar with the remaining time, for terminals."""

    def __init__(self, title: str, err: Console) -> None:
        super().__init__(err)
        self.bar = Progress(
            TextColumn("{task.description:<22}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=err,
        )
        self.task = self.bar.add_task(title, total=1.0, note="")

    def __enter__(self) -> "ProgressBar":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def on_begin(self, label: str, sessions: int) -> None:
        """Show the label."""
        super().on_begin(label, sessions)
        self.bar.update(self.task, description=label)

    def on_training_step(self, session: int, step: int, total: int, loss: float) -> None:
        """Advance within the labelled phase."""
        super().on_training_step(session, step, total, loss)
        note = f"session {session + 1}, loss {loss:.2f}"
        self._update(session, LABELLED_SHARE * step / total, note)

    def on_stream_step(self, session: int, step: int, total: int) -> None:
        """Advance within the unlabelled phase."""
        super().on_stream_step(session, step, total)
        share = LABELLED_SHARE + (1 - LABELLED_SHARE) * step / total
        self._update(session, share, f"session {session + 1}, stream")

    def on_evaluation(self, session: int, accuracies: list[float]) -> None:
        """Show the mean accuracy."""
        self._update(session, 1.0, _format_mean(accuracies))

    def _update(self, session: int, share: float, note: str) -> None:
        self.bar.update(self.task, completed=(session + share) / self.sessions, note=note)


def _format_mean(accuracies: list[float]) -> str:
    return f"{sum(accuracies) / len(accuracies):.1f} % on {plural(len(accuracies), 'task')}"


@contextmanager
def grid_progress(
    planned: Sequence[RunSettings], err: Console
) -> Iterator[Callable[[Outcome], None]]:
    """Show the outcomes of a grid as they arrive.

    Args:
        planned: All runs of the grid.
        err: Where to print.

    Yields:
        The function to call with each outcome.
    """
    grid = GridTable(planned, err)
    if not err.is_terminal:
        yield grid.print_line
        return
    with Live(grid.render(), console=err, refresh_per_second=2) as live:

        def show_outcome(outcome: Outcome) -> None:
            grid.add(outcome)
            if outcome.result is None:
                live.console.print(f"{grid.row_name(outcome.settings)}: {outcome.error}")
            live.update(grid.render())

        yield show_outcome


class GridTable:
    """The outcomes of a grid so far."""

    def __init__(self, planned: Sequence[RunSettings], err: Console) -> None:
        self.planned, self.err = planned, err
        self.outcomes: list[Outcome] = []
        self.has_several_datasets = len({settings.data for settings in planned}) > 1
        self.names = list(dict.fromkeys(map(self.row_name, planned)))
        self.bar = Progress(
            TextColumn("runs"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=err,
        )
        self.task = self.bar.add_task("runs", total=len(planned))

    def row_name(self, settings: RunSettings) -> str:
        """The name of a run's row: its label, and its dataset if there are several."""
        label = run_label(settings)
        return f"{label}, {settings.data}" if self.has_several_datasets else label

    def add(self, outcome: Outcome) -> None:
        """Count an outcome."""
        self.outcomes.append(outcome)
        self.bar.update(self.task, completed=len(self.outcomes))

    def print_line(self, outcome: Outcome) -> None:
        """Count an outcome and print it as one line."""
        self.add(outcome)
        message = outcome.error
        if outcome.result:
            metrics = outcome.result.metrics
            message = f"Acc {_mean([metrics['accuracy']])}  F {_mean([metrics['forgetting']])}"
        name = f"{self.row_name(outcome.settings)}, seed {outcome.settings.seed}"
        self.err.print(f"{len(self.outcomes)}/{len(self.planned)} {name}: {message}")

    def render(self) -> Group:
        """The table, and a bar below it."""
        table = Table(box=None, header_style="bold")
        for head in ("run", "done", "Acc", "F", "failed"):
            table.add_column(head, justify="left" if head == "run" else "right")
        started = (self.names.index(self.row_name(o.settings)) + 1 for o in self.outcomes)
        visible = self.names[: max(started, default=0) + PENDING_ROWS]
        for name in visible[-(self.err.height - 4) :]:
            outcomes = [o for o in self.outcomes if self.row_name(o.settings) == name]
            metrics = [o.result.metrics for o in outcomes if o.result]
            table.add_row(
                name,
                f"{len(outcomes)}/{sum(self.row_name(s) == name for s in self.planned)}",
                _mean([m["accuracy"] for m in metrics]),
                _mean([m["forgetting"] for m in metrics]),
                str(len(outcomes) - len(metrics)) if len(metrics) < len(outcomes) else "",
            )
        return Group(table, self.bar)


def _mean(values: list[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    return f"{sum(numbers) / len(numbers):.1f}" if numbers else "–"
