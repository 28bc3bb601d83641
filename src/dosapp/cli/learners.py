"""Commands on the folder of a learner: create, history, export."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from dosapp.cli.console import CommandGroup, Json, LearnerFolder, SetOption, app, out, print_table
from dosapp.cli.flags import with_settings
from dosapp.errors import BusyError, InputError
from dosapp.runtime.plural import plural
from dosapp.settings import LearnerSettings, parse_options


@app.command()
@with_settings(LearnerSettings)
def new(
    flags: dict[str, Any],
    folder: Annotated[Path, typer.Argument(help="a folder that does not exist yet")],
    options: SetOption = None,
) -> None:
    """Create a learner without classes."""
    from dosapp.learner.learner import Learner

    if folder.exists():
        raise InputError(f"'{folder}' already exists; choose another folder")
    Learner(LearnerSettings.parse({**flags, "options": parse_options(options or [])})).save(
        folder, "new"
    )
    out.print(f"wrote {folder}; now: dosapp serve {folder}")


@app.command()
def configure(
    folder: LearnerFolder,
    lr: Annotated[float | None, typer.Option(help="learning rate")] = None,
    epochs: Annotated[int | None, typer.Option(help="passes over the images of a session")] = None,
    batch_size: Annotated[int | None, typer.Option(help="labelled images per step")] = None,
) -> None:
    """Change how a saved learner trains its next sessions.

    Stop its service first.
    """
    from dosapp.learner.learner import Learner

    values = {"lr": lr, "epochs": epochs, "batch_size": batch_size}
    given = {name: value for name, value in values.items() if value is not None}
    if not given:
        raise InputError("nothing to change; give --lr, --epochs or --batch-size")
    learner = Learner.load(folder)
    learner.change_training(lr=lr, epochs=epochs, batch_size=batch_size)
    changed = ", ".join(f"{name} {value:g}" for name, value in given.items())
    learner.save(folder, f"configured: {changed}")
    out.print(f"{folder} now trains with {changed}")


history_app = CommandGroup(
    help="Versions of a learner: list, compare, roll back.", no_args_is_help=True
)
app.add_typer(history_app, name="history")
Number = Annotated[int, typer.Argument(min=1, help="a version's number")]
Backbone = Annotated[
    str | None, typer.Option(help="where the learner's backbone is now, if it has moved")
]
From = Annotated[int, typer.Argument(min=0, help="a version's number; 0: before any training")]


@history_app.command("list")
def history_list(folder: LearnerFolder, as_json: Json = False) -> None:
    """List the versions: time, reason, number of classes, size."""
    from dosapp.learner.learner import Learner

    versions = Learner.open_history(folder).versions()
    if as_json:
        print(json.dumps([vars(version) for version in versions], indent=1))
        return
    table = Table(box=None, header_style="bold")
    for head in ("version", "when", "why", "classes", "kB"):
        table.add_column(head, justify="right" if head in ("version", "classes", "kB") else "left")
    for v in versions:
        count = str(len(v.facts.get("classes", ())))
        table.add_row(str(v.number), v.created, v.reason, count, f"{v.size / 1000:,.0f}")
    print_table(table)


@history_app.command("show")
def history_show(folder: LearnerFolder, number: Number, as_json: Json = False) -> None:
    """Show one version."""
    from dosapp.learner.learner import Learner

    version = Learner.open_history(folder).version(number)
    if as_json:
        print(json.dumps(vars(version), indent=1))
        return
    lines = {
        "version": f"{version.number}, {version.reason}, {version.created}",
        "checksum": version.checksum,
        "parent": version.parent or "none",
        "classes": ", ".join(map(str, version.facts.get("classes", ()))),
        "sessions, steps": f"{version.facts.get('sessions')}, {version.facts.get('steps')}",
        "measured": _format_measured(version.seen) or "nothing",
    }
    for name, value in lines.items():
        out.print(Text.assemble((name, "bold"), "  ", value))


def _format_measured(values: Mapping[str, Any]) -> str:
    """Measured values as `name value`, with few digits."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
    )


@history_app.command("diff")
def history_diff(
    folder: LearnerFolder,
    first: From,
    second: From,
    backbone: Backbone = None,
    as_json: Json = False,
) -> None:
    """List the weights that differ between two versions, and by how much.

    `--json` has all other tensors, too: masks, class statistics, stored images.
    """
    from dosapp.learner.learner import Learner
    from dosapp.learner.state import is_weight

    diffs = Learner.open_history(folder, backbone).diff(first, second)
    if as_json:
        print(json.dumps([vars(diff) for diff in diffs], indent=1))
        return
    weights = [diff for diff in diffs if is_weight(diff.name)]
    others = Counter(diff.name.partition("/")[0] for diff in diffs if not is_weight(diff.name))
    table = Table(box=None, header_style="bold")
    for head in ("tensor", "entries", "of", "distance", "largest"):
        table.add_column(head, justify="left" if head == "tensor" else "right")
    for diff in weights:
        entries, total = f"{diff.entries:,}", f"{diff.of:,}"
        table.add_row(diff.name, entries, total, f"{diff.distance:.4g}", f"{diff.largest:.3g}")
    if weights:
        print_table(table)
    if others:
        listed = ", ".join(f"{name} ({count})" for name, count in others.items())
        out.print(f"other tensors that differ (--json): {listed}")
    if not diffs:
        out.print(f"versions {first} and {second} are the same")


@history_app.command("rollback")
def history_rollback(folder: LearnerFolder, number: Number, backbone: Backbone = None) -> None:
    """Append a copy of an earlier version; no version is lost."""
    from dosapp.learner.learner import Learner

    Learner.open_history(folder).version(number)  # raises before anything changes
    try:
        version = Learner.rollback(folder, number, backbone).history(folder).versions()[-1]
    except BusyError as error:
        raise BusyError(f"{error}; while it is served: dosapp client rollback {number}") from error
    out.print(f"version {version.number} is a copy of version {number}")


@history_app.command("gc")
def history_gc(
    folder: LearnerFolder,
    keep: Annotated[int, typer.Option(min=1, help="how many of the last versions to keep")],
    backbone: Backbone = None,
) -> None:
    """Drop old versions; their changes are merged into the oldest that is kept."""
    from dosapp.learner.learner import Learner
    from dosapp.runtime.files import lock_folder

    history = Learner.open_history(folder, backbone)
    with lock_folder(folder) as lock:
        history.begin_writing(lock)
        dropped = history.prune(keep)
    out.print(f"{plural(dropped, 'version')} dropped")


Repository = Annotated[str, typer.Argument(help="ORG/NAME on the Hugging Face Hub")]
HubToken = Annotated[str | None, typer.Option(envvar="HF_TOKEN", help="of the hub, if needed")]


@app.command()
def push(
    folder: LearnerFolder,
    repository: Repository,
    public: Annotated[bool, typer.Option("--public", help="a new repository is public")] = False,
    include_images: Annotated[
        bool, typer.Option("--include-images", help="also if it holds images")
    ] = False,
    token: HubToken = None,
    dry_run: Annotated[bool, typer.Option(help="print the model card, upload nothing")] = False,
) -> None:
    """Upload a learner to the Hugging Face Hub, with a model card."""
    from dosapp.learner.hub import push_folder
    from dosapp.learner.model_card import write_model_card

    if dry_run:
        print(write_model_card(folder, repository), end="")
        return
    address = push_folder(
        folder, repository, private=not public, include_images=include_images, token=token
    )
    out.print(f"wrote {address}; load it with Learner.from_pretrained('{repository}')")


@app.command()
def pull(
    repository: Repository,
    folder: Annotated[Path, typer.Argument(help="a new folder")],
    revision: Annotated[str | None, typer.Option(help="a branch, tag or commit")] = None,
    token: HubToken = None,
) -> None:
    """Download a learner from the Hugging Face Hub."""
    from dosapp.learner.hub import pull_folder

    pull_folder(repository, folder, revision=revision, token=token)
    out.print(f"wrote {folder}; now: dosapp serve {folder}")


@app.command()
def export(
    folder: LearnerFolder,
    target: Annotated[Path, typer.Argument(help="a new folder")],
    kind: Annotated[
        Literal["pretrained", "onnx"] | None,
        typer.Option(help="[onnx if a head predicts, else pretrained]"),
    ] = None,
    backbone: Backbone = None,
    force: Annotated[bool, typer.Option("--force", help="replace an earlier export")] = False,
) -> None:
    """Write the answering expert for transformers, or as ONNX."""
    from dosapp.learner.export import check_target
    from dosapp.learner.export import export as write
    from dosapp.learner.learner import Learner
    from dosapp.runtime.extras import check_extra

    if kind == "onnx":
        check_extra("an ONNX export", "onnx")
    check_target(target, force)  # before the learner is loaded
    write(Learner.load(folder, backbone), target, kind, force=force)
    out.print(f"wrote {target}")
