"""A progress bar for programs that train a learner; commands have displays of their own."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dosapp.runtime import distributed

NO_PROGRESS = "DOSAPP_NO_PROGRESS"  # environment variable that switches the bar off
ShowProgress = Callable[[int, int | None, str], None]  # steps done, of how many if known, a note


@contextmanager
def progress_bar(title: str, is_shown: bool | None = None) -> Iterator[ShowProgress]:
    """Show a bar on stderr, with the remaining time.

    Args:
        title: What goes on.
        is_shown: Whether there is one; if None, only on a terminal.

    Yields:
        The function to call with the progress; without a bar it does nothing.
    """
    if is_shown is None:
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        is_shown = is_terminal and not os.environ.get(NO_PROGRESS) and distributed.rank() == 0
    if not is_shown:
        yield lambda done, total, note: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    title_column, note_column = TextColumn(title), TextColumn("{task.fields[note]}")
    console = Console(stderr=True, markup=False, emoji=False)
    with Progress(title_column, *columns, note_column, console=console) as bar:
        task = bar.add_task(title, total=None, note="")

        def show(done: int, total: int | None, note: str) -> None:
            bar.update(task, completed=done, total=total, note=note)

        yield show
