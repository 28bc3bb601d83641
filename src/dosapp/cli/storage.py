"""Commands for the operator of a learner's folder: check it, copy it, put a copy back."""

from pathlib import Path
from typing import Annotated

import typer

from dosapp.cli.console import LearnerFolder, app, err, out
from dosapp.errors import InputError


@app.command()
def verify(folder: LearnerFolder) -> None:
    """Check every file and version of a learner's folder or backup.

    One line for each problem, and exit code 1 if there is one. The learner may be served meanwhile.
    """
    from dosapp.learner.verify import find_problems

    if not folder.is_dir():
        raise InputError(f"'{folder}' is no folder; give that of a learner or of a backup")
    if not (folder / "learner.json").exists() and not (folder / "versions").exists():
        raise InputError(f"'{folder}' holds no learner; give the folder of one, or of a backup")
    problems = find_problems(folder)
    for problem in problems:
        print(problem)
    if problems:
        raise typer.Exit(1)
    out.print(f"{folder} is intact")


@app.command()
def backup(
    folder: LearnerFolder,
    target: Annotated[Path, typer.Argument(help="a new folder")],
) -> None:
    """Copy a learner's folder, also while it is served, and check it."""
    from dosapp.learner.backup import copy_learner

    with err.status("copying"):
        version = copy_learner(folder, target)
    out.print(
        f"wrote {target}, at version {version}; put it back with: dosapp restore {target} NEW"
    )


@app.command()
def restore(
    backup: Annotated[Path, typer.Argument(help="a folder written by dosapp backup")],
    folder: Annotated[Path, typer.Argument(help="a new folder")],
) -> None:
    """Check a backup and copy it to a new folder."""
    from dosapp.learner.backup import copy_learner

    with err.status("copying"):
        version = copy_learner(backup, folder)
    out.print(f"wrote {folder}, at version {version}; now: dosapp serve {folder}")
