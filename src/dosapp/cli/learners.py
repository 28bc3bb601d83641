"""Commands on a learner's folder: a new one, its history, and what leaves it."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from dosapp.cli.console import Json, LearnerFolder, SetOption, app, out
from dosapp.cli.flags import with_settings
from dosapp.errors import InputError
from dosapp.settings import LearnerSettings, parse_options


@app.command()
@with_settings(LearnerSettings)
def new(
    flags: dict[str, Any],
    folder: Annotated[Path, typer.Argument(help="a folder that is not there yet")],
    options: SetOption = None,
) -> None:
    """A learner without classes, for dosapp serve or a program."""
    from dosapp.learner.learner import Learner

    if folder.exists():
        raise InputError(f"'{folder}' is there already; choose another folder")
    Learner(LearnerSettings.parse({**flags, "options": parse_options(options or [])})).save(
        folder, "new"
    )
    out.print(f"wrote {folder}; now: dosapp serve {folder}")


history_app = typer.Typer(
    help="Versions of a learner: list, compare, go back.", no_args_is_help=True
)
app.add_typer(history_app, name="history")
Number = Annotated[int, typer.Argument(min=1, help="a version's number")]
From = Annotated[int, typer.Argument(min=0, help="a version's number; 0: before any learning")]


@history_app.command("list")
def history_list(folder: LearnerFolder, as_json: Json = False) -> None:
    """Every version: when, why, how many classes, how many bytes."""
    from dosapp.learner.learner import Learner

    found = Learner.open_history(folder).versions()
    if as_json:
        print(json.dumps([vars(version) for version in found], indent=1))
        return
    table = Table(box=None, header_style="bold")
    for head in ("version", "when", "why", "classes", "kB"):
        table.add_column(head, justify="right" if head in ("version", "classes", "kB") else "left")
    for v in found:
        count = str(len(v.facts["classes"]))
        table.add_row(str(v.number), v.created, v.reason, count, f"{v.size / 1000:,.0f}")
    out.print(table, soft_wrap=False)


@history_app.command("show")
def history_show(folder: LearnerFolder, number: Number, as_json: Json = False) -> None:
    """One version, whole."""
    from dosapp.learner.learner import Learner

    version = Learner.open_history(folder).version(number)
    if as_json:
        print(json.dumps(vars(version), indent=1))
        return
    lines = {
        "version": f"{version.number}, {version.reason}, {version.created}",
        "checksum": version.checksum,
        "parent": version.parent or "none",
        "classes": ", ".join(version.facts["classes"]),
        "sessions, steps": f"{version.facts['sessions']}, {version.facts['steps']}",
        "measured": json.dumps(version.seen) if version.seen else "nothing",
    }
    for name, value in lines.items():
        out.print(Text.assemble((name, "bold"), "  ", value))


@history_app.command("diff")
def history_diff(folder: LearnerFolder, first: From, second: From, as_json: Json = False) -> None:
    """Which layers moved from one version to another, and how far."""
    from dosapp.learner.learner import Learner

    found = Learner.open_history(folder).diff(first, second)
    if as_json:
        print(json.dumps([vars(one) for one in found], indent=1))
        return
    table = Table(box=None, header_style="bold")
    for head in ("tensor", "entries", "of", "distance", "largest"):
        table.add_column(head, justify="left" if head == "tensor" else "right")
    for one in found:
        table.add_row(
            one.name, f"{one.entries:,}", f"{one.of:,}", f"{one.distance:.4g}", f"{one.largest:.3g}"
        )
    out.print(table if found else f"versions {first} and {second} are the same", soft_wrap=False)


@history_app.command("rollback")
def history_rollback(folder: LearnerFolder, number: Number) -> None:
    """Go back to a version, as a new one on top: nothing is lost."""
    from dosapp.learner.learner import Learner

    Learner.open_history(folder).version(number)  # before anything is touched
    made = Learner.rollback(folder, number).history(folder).versions()[-1]
    out.print(f"version {made.number} is what version {number} was")


@history_app.command("gc")
def history_gc(
    folder: LearnerFolder,
    keep: Annotated[int, typer.Option(min=1, help="how many of the last versions stay")],
) -> None:
    """Drop old versions; the oldest that stays takes in what came before it."""
    from dosapp.learner.learner import Learner
    from dosapp.runtime.files import lock_folder

    history = Learner.open_history(folder)
    with lock_folder(folder):
        gone = history.prune(keep)
    out.print(f"{gone} version(s) dropped")


@app.command()
def export(
    folder: LearnerFolder,
    place: Annotated[Path, typer.Argument(help="a new folder")],
    kind: Annotated[Literal["pretrained", "onnx"], typer.Option()] = "pretrained",
) -> None:
    """What answers, for transformers, or as ONNX."""
    from dosapp.learner.export import export as write
    from dosapp.learner.learner import Learner

    write(Learner.load(folder), place, kind)
    out.print(f"wrote {place}")
