"""Shared by all commands: the application, the two consoles, common flags, the result table."""

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from typer.core import TyperCommand

from dosapp.runtime.plural import plural

if TYPE_CHECKING:
    from dosapp.experiments.result import Result


Function = TypeVar("Function", bound=Callable[..., Any])


class Command(TyperCommand):
    """A command whose errors name the value that is wrong; typer's name the flag only."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, and add the value to the message."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if isinstance(error.__cause__, ValidationError):
                first = error.__cause__.errors()[0]
                error.message = f"'{first['input']}': {first['msg'][0].lower()}{first['msg'][1:]}"
            raise


class CommandGroup(typer.Typer):
    """Commands of the class above."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Function], Function]:
        """Register a command."""
        return super().command(name, **{"cls": Command, **options})


app = CommandGroup(
    help="Dual-phase continual learning for CLIP: train on labels, retain on a stream.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 120},
)


def _print_version(is_given: bool) -> None:
    if is_given:
        print(f"dosapp {metadata.version('dosapp')}")
        raise typer.Exit


@app.callback()
def dosapp(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None: ...


# Names of classes and folders are arbitrary, so text is markup only where a call says so. Lines are
# not wrapped, so that scripts can read them one by one.
out = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
err = Console(markup=False, emoji=False, highlight=False, soft_wrap=True, stderr=True)

NO_LEARNING = 1.0  # points from zero-shot accuracy within which nothing was learned
COARSE = 2.0  # points of accuracy for one test image, above which a difference may be chance
FORGOTTEN = 20.0  # points lost since each task was new

Json = Annotated[bool, typer.Option("--json", help="print JSON")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="a hyper-parameter of the method, name=value; repeatable"),
]
Config = Annotated[Path | None, typer.Argument(help="a YAML file of settings; flags override it")]
LearnerFolder = Annotated[Path, typer.Argument(help="a learner's folder")]


def print_table(table: Table) -> None:
    """Print a table at its full width: no cell is cut, since scripts read the lines."""
    options = out.options.update(max_width=10_000)
    width = max(out.width, Measurement.get(out, options, table).maximum)
    # `out.print(width=…)` is limited to the width of `out`, so this takes a wider console.
    Console(markup=False, emoji=False, highlight=False, width=width).print(table, no_wrap=True)


def describe_no_learning(result: "Result") -> str:
    """Say that a run ended where it began or below, and what would help; empty if it did not."""
    accuracy, zero_shot = (result.metrics.get(n) for n in ("accuracy", "zero_shot_accuracy"))
    learned = result.metrics.get("learning_accuracy")
    s, training = result.settings, result.training or result.settings
    if accuracy is None or zero_shot is None or s["method"] == "zero-shot":
        return ""
    used = f"learning rate {training['lr']:g}, {plural(training['epochs'], 'epoch')}"
    if accuracy <= zero_shot - NO_LEARNING:
        return (
            f"{result.label} has {accuracy:.1f} %, less than its zero-shot accuracy of "
            f"{zero_shot:.1f} % ({used}). Try more images per class, a smaller --lr, or fewer "
            "--epochs"
        )
    # A run that has forgotten all it had learned knew each task better when it was new.
    if accuracy - zero_shot >= NO_LEARNING or (learned or 0.0) - accuracy >= FORGOTTEN:
        return ""
    if zero_shot > 100 - NO_LEARNING:  # there was nothing left to learn
        return ""
    search = "'dosapp tune' with the same --data and --backbone"
    if s.get("lr") is not None:  # otherwise the first session has chosen it
        search = f"--auto-lr, {search}"
    return (
        f"{result.label} has {accuracy:.1f} %, its zero-shot accuracy: nothing was learned with "
        f"{used} and batches of {training.get('batch_size', training.get('batch'))}. Try {search}, "
        "more --epochs, or a smaller --batch-size"
    )


def describe_short_stream(result: "Result") -> str:
    """Say that every stream was one step; empty if one was longer, or the method does not adapt."""
    if max(result.steps.get("stream") or [0]) != 1:
        return ""
    size, images = result.settings["stream_batch_size"], max(result.stream["images"])
    batch, remedy = "one batch", "Give more test images: half of them are the stream"
    if size is not None:
        batch, remedy = f"one batch of {size}", "Try a smaller --stream-batch-size"
    return (
        f"{result.label} took one step on each stream: its {plural(images, 'image')} or fewer are "
        f"{batch}, so the adaptation shows little. {remedy}"
    )


def describe_small_test(result: "Result") -> str:
    """Say that the accuracy rests on few test images; empty if there are enough."""
    images = sum(task.get("test", 0) for task in result.tasks)
    if not 0 < images * COARSE < 100:
        return ""
    return (
        f"the test set has {plural(images, 'image')}, so each is worth {100 / images:.1f} points "
        "of Acc. Give more test images before you compare methods"
    )


def describe_training(result: "Result") -> str:
    """The learning rate, epochs and batch size that were used; empty if nothing trained."""
    training = result.training
    if result.settings["method"] == "zero-shot" or not training.get("lr"):
        return ""
    return (
        f"trained with learning rate {training['lr']:g}, {plural(training['epochs'], 'epoch')}, "
        f"batches of {training['batch_size']}"
    )


def describe_tiny_backbone(results: "list[Result]") -> str:
    """Say that the embedded backbone is not meant for photos; empty if it saw generated images."""
    from dosapp.data.registry import SYNTHETIC

    on_tiny = [r.settings["data"] for r in results if r.settings.get("backbone") == "tiny"]
    if {part for data in on_tiny for part in data.split("+")} <= SYNTHETIC.keys():
        return ""
    return "the backbone 'tiny' knows generated shapes only; for photos give --backbone ViT-B-16"


def print_results(
    results: "list[Result]", as_json: bool, costs: bool = False, against: str | None = None
) -> None:
    """Print results as a table, or as JSON.

    Args:
        results: The results.
        as_json: Print JSON.
        costs: Add seconds and peak memory to the table.
        against: A row from which the others are subtracted, seed by seed.
    """
    from dosapp.experiments.metrics import DEFINITIONS
    from dosapp.report.tables import (
        COLUMNS,
        MEANINGS,
        WITH_COSTS,
        build_rows,
        paired_differences,
    )

    if as_json:
        print(json.dumps([r.model_dump(mode="json") for r in results]))
        return
    table = Table(box=None, header_style="bold")
    table.add_column("method")
    columns = WITH_COSTS if costs else COLUMNS
    columns = {**columns, "zero_shot_accuracy": "zero-shot"}  # what the result must beat
    for name in columns.values():
        table.add_column(name, justify="right")
    rows = build_rows(results)
    for row in rows:
        table.add_row(row.name, *(row.text(metric) for metric in columns))
    print_table(table)
    for metric, name in columns.items():
        formula = f": {DEFINITIONS[metric]}" if metric == "forgetting" else ""
        out.print(f"{name.rstrip(' ↑↓')} = {MEANINGS[metric]}{formula}", style="dim")
    if len(results) == 1 and (training := describe_training(results[0])):
        out.print(training)
    descriptions = (describe_no_learning, describe_short_stream, describe_small_test)
    notes = [describe(r) for r in results for describe in descriptions]
    for note in dict.fromkeys([*notes, describe_tiny_backbone(results)]):  # seeds have equal ones
        if note:
            err.print(f"note: {note}")
    if against is not None:
        out.print(f"\n{paired_differences(rows, against)}")
