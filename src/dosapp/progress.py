"""What a person sees while a run goes on."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dosapp.run import Watch


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
