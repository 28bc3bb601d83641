"""Commands on data: look at a dataset before training."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from dosapp.cli.console import CommandGroup, Json, app, err, out
from dosapp.errors import InputError
from dosapp.runtime.plural import plural

if TYPE_CHECKING:
    from dosapp.data.inspection import Inspection

data_app = CommandGroup(help="Look at data before training.", no_args_is_help=True)
app.add_typer(data_app, name="data")
LISTED = 5  # broken files and duplicates that are printed; --json has all


@data_app.command("inspect")
def data_inspect(
    data: Annotated[str, typer.Argument(help="what --data takes: a folder, tar, zip, CSV, hub id")],
    data_dir: Annotated[Path | None, typer.Option(help="a copy of the paper's datasets")] = None,
    sheet: Annotated[
        Path | None, typer.Option(help="write a contact sheet to this PNG or JPEG file")
    ] = None,
    as_json: Json = False,
) -> None:
    """Count images, and find broken ones and duplicates; exit code 1 if one is broken."""
    from rich.progress import Progress

    from dosapp.data.inspection import draw_contact_sheet, inspect_dataset
    from dosapp.data.registry import SYNTHETIC, open_dataset
    from dosapp.runtime.files import write_bytes

    if data in SYNTHETIC:
        raise InputError(f"'{data}' is generated, so there is nothing to inspect; give a path")
    if sheet is not None and sheet.suffix.lower() not in (".png", ".jpg", ".jpeg"):
        raise InputError(f"--sheet is '{sheet}'; give a file that ends with .png or .jpg")
    dataset = open_dataset(data, data_dir)
    total = len(dataset.train.labels) + len(dataset.test.labels)
    with Progress(console=err, transient=True) as progress:
        task = progress.add_task("reading images", total=total)
        found = inspect_dataset(dataset, lambda: progress.advance(task))
    if sheet is not None:
        import io

        with io.BytesIO() as buffer:
            kind = "PNG" if sheet.suffix.lower() == ".png" else "JPEG"
            draw_contact_sheet(found).save(buffer, kind)
            write_bytes(sheet, buffer.getvalue())
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        _print_inspection(found)
        if sheet is not None:
            out.print(f"wrote {sheet}")
    if found.broken:
        count = plural(len(found.broken), "image")
        err.print(f"{count} cannot be read; remove them, or train with --skip-bad-images")
        raise typer.Exit(1)


def _print_inspection(found: "Inspection") -> None:
    table = Table(box=None, header_style="bold")
    table.add_column("class")
    table.add_column("train", justify="right")
    table.add_column("test", justify="right")
    for name, count in found.counts().items():
        table.add_row(name, str(count["train"]), str(count["test"]))
    out.print(table, soft_wrap=False)
    sides = found.sides()
    out.print(
        f"{len(found.images)} images in {len(found.classes)} classes; shorter side {sides[0]} to "
        f"{sides[-1]} pixels, median {sides[len(sides) // 2]}"
    )
    for sentence in found.broken[:LISTED]:
        out.print(f"broken: {sentence}")
    for group in found.duplicates[:LISTED]:
        out.print("duplicates: " + ", ".join(f"{image.split}: {image.name}" for image in group))
    for kind, groups in {
        "duplicates": found.duplicates,
        "across train and test": found.leaks(),
        "across classes": found.conflicts(),
    }.items():
        out.print(f"{kind}: {len(groups)} group{'' if len(groups) == 1 else 's'}")
    for note in found.notes():
        out.print(f"note: {note}")
