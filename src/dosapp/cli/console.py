"""What all commands share: the application, where they print, and flags that mean the same."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from dosapp.experiments.result import Result

app = typer.Typer(
    help="Dual-phase continual learning for CLIP: learn with labels, keep with the stream.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 120},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"dosapp {version('dosapp')}")
        raise typer.Exit


@app.callback()
def dosapp(
    asked: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None: ...


# People name classes and folders as they like: what is printed is never markup unless it says so,
# and no line is broken: that is for the terminal, and others read line by line.
out = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
err = Console(markup=False, emoji=False, highlight=False, soft_wrap=True, stderr=True)

Json = Annotated[bool, typer.Option("--json", help="print JSON, for machines")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="a setting of the method, name=value; repeatable")
]
Config = Annotated[Path | None, typer.Argument(help="a YAML file of settings; flags win over it")]
LearnerFolder = Annotated[Path, typer.Argument(help="a learner's folder")]


def show(
    results: "list[Result]", as_json: bool, costs: bool = False, against: str | None = None
) -> None:
    from dosapp.experiments.metrics import DEFINITIONS
    from dosapp.report.tables import COLUMNS, WITH_COSTS, paired, rows

    if as_json:
        print(json.dumps([r.model_dump(mode="json") for r in results]))
        return
    table = Table(box=None, header_style="bold")
    table.add_column("method")
    columns = WITH_COSTS if costs else COLUMNS
    for name in columns.values():
        table.add_column(name, justify="right")
    found = rows(results)
    for row in found:
        table.add_row(row.name, *(row.text(metric) for metric in columns))
    out.print(table, soft_wrap=False)
    out.print(f"F = {DEFINITIONS['forgetting']}", style="dim")
    if against is not None:
        out.print(f"\n{paired(found, against)}")
