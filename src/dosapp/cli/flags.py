"""Command-line flags from settings models: each setting is described once, in its model."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from dosapp.backbones.names import join_open_clip_names
from dosapp.cli.completion import COMPLETIONS
from dosapp.cli.console import Command
from dosapp.errors import InputError
from dosapp.settings import Settings

OPEN_CLIP = ("model", "pretrained")  # its flags for the backbone


def with_settings(
    model: type[Settings], without: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command with one flag per field of a settings model.

    Other names of a setting are flags too, without a line in `--help`: those of version 0.1, of
    transformers (`--learning-rate`) and of open_clip (`--model`, `--pretrained`). The decorated
    command gets the given values as `flags`, by today's names.

    Args:
        model: The settings.
        without: Fields that get no flag.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        fields = {k: f for k, f in model.model_fields.items() if k not in ("options", *without)}
        flags = [_parameter(name, field) for name, field in fields.items()]
        flags += [
            _parameter(alias, fields[name], hidden=True)
            for alias, name in model.aliases.items()
            if name in fields
        ]
        if "backbone" in fields:
            flags += [_parameter(name, fields["backbone"], hidden=True) for name in OPEN_CLIP]
        names = {flag.name for flag in flags}

        def wrapped(**values: Any) -> None:
            given = {k: v for k, v in values.items() if k in names and v is not None}
            rest = {k: v for k, v in values.items() if k not in names}
            command(**rest, flags=model.rename_aliases(_join_open_clip(given)))

        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name != "flags"]
        wrapped.__signature__ = inspect.Signature([*kept, *flags])  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in [*kept, *flags]}
        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        return wrapped

    return decorate


class ResumeLatest(Command):
    """A command that accepts open_clip's `--resume latest` for `--resume`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave the word out: a run continues from its last checkpoint in any case."""
        previous = ["", *args]
        kept = [
            arg.removesuffix("=latest") if arg == "--resume=latest" else arg
            for before, arg in zip(previous, args, strict=False)
            if (before, arg) != ("--resume", "latest")
        ]
        return super().parse_args(ctx, kept)


def _join_open_clip(given: dict[str, Any]) -> dict[str, Any]:
    """Replace open_clip's two flags by the backbone that they name."""
    pair = [given.pop(name, None) for name in OPEN_CLIP]
    if pair == [None, None]:
        return given
    if "backbone" in given:
        raise InputError("the backbone is given twice, as --backbone and as --model; give it once")
    return {**given, "backbone": join_open_clip_names(*pair)}


def _parameter(name: str, field: FieldInfo, hidden: bool = False) -> inspect.Parameter:
    kind: Any = field.annotation
    flag = name.replace("_", "-")
    default = "" if field.default in (None, "") else f" [{field.default}]"
    if kind is bool:
        default = f" [{'yes' if field.default else 'no'}]"
    option = typer.Option(
        f"--{flag}/--no-{flag}" if kind in (bool, bool | None) else f"--{flag}",
        help=f"{field.description}{default}",
        show_default=False,
        hidden=hidden,
        autocompletion=COMPLETIONS.get(name),
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )
