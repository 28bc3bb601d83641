"""Commands that check the machine, a backbone and a dataset, and that list and clear the cache."""

import datetime
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from dosapp.cli.console import Json, app, err, out
from dosapp.runtime.plural import plural


@app.command()
def doctor(
    backbone: Annotated[str, typer.Option(help="the backbone to check")] = "tiny",
    data: Annotated[
        str | None, typer.Option(help="a dataset whose class names are checked, name or path")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="a copy of the paper's datasets")] = None,
    as_json: Json = False,
) -> None:
    """Check torch, disk, cache, a backbone and class names.

    The exit code is 1 if a problem was found.
    """
    from dosapp.data.registry import load_dataset
    from dosapp.doctor.class_names import check_classes
    from dosapp.doctor.machine import check_machine
    from dosapp.doctor.model import check_backbone

    with err.status("checking the machine") as status:
        findings = check_machine()
        status.update(f"checking {backbone}")
        loaded, found = check_backbone(backbone)
        findings += found
        if data is not None and loaded is not None:
            status.update(f"checking the class names of {data}")
            dataset = load_dataset(data, loaded.preprocess, data_dir=data_dir)
            findings += check_classes(dataset, loaded)
    problems = sum(finding.status == "problem" for finding in findings)
    if as_json:
        print(json.dumps({"problems": problems, "findings": [asdict(f) for f in findings]}))
    else:
        for finding in findings:
            mark = "[green]ok[/green]     " if finding.status == "ok" else "[red]PROBLEM[/red]"
            out.print(f"{mark} [bold]{finding.check:13}[/bold] ", markup=True, end="")
            out.print(finding.message)
        out.print(plural(problems, "problem") if problems else "all fine")
    raise typer.Exit(1 if problems else 0)


@app.command()
def cache(
    action: Annotated[Literal["list", "clear"], typer.Argument(help="list or clear")],
    as_json: Json = False,
) -> None:
    """List or clear the cache of decoded images."""
    from dosapp.data.cache import cache_folder, clear_cache, list_cache

    entries = clear_cache() if action == "clear" else list_cache()
    total = sum(entry.bytes for entry in entries)
    if as_json:
        print(json.dumps({"folder": str(cache_folder()), "bytes": total, "files": len(entries)}))
        return
    if action == "list":
        for entry in entries:
            used = datetime.datetime.fromtimestamp(entry.used).isoformat(" ", "minutes")
            out.print(
                f"{entry.bytes / 1e6:10.1f} MB  {entry.images:7} images  {used}  {entry.name}"
            )
    verb = "deleted" if action == "clear" else "in all"
    out.print(f"{total / 1e6:.1f} MB in {plural(len(entries), 'file')} {verb}, {cache_folder()}")
