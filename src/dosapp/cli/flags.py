"""Flags from settings models: each setting is described once, in its model."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from dosapp.settings import Settings


def with_settings(
    model: type[Settings], without: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command with one flag per field of a settings model.

    Old names of a setting are flags too. The command gets the given values as `flags`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        flags = []
        for name, field in model.model_fields.items():
            if name == "options" or name in without:
                continue
            kind = field.annotation
            default = "" if field.default is None else f" [{field.default}]"
            if kind is bool:
                default = f" [{'yes' if field.default else 'no'}]"
            option = typer.Option(
                *_flag_names(model, name, kind is bool),
                help=f"{field.description}{default}",
                show_default=False,
            )
            flags.append(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=None,
                    annotation=Annotated[kind | None, option],  # type: ignore[operator]
                )
            )

        def wrapped(**values: Any) -> None:
            names = {flag.name for flag in flags}
            given = {k: v for k, v in values.items() if k in names and v is not None}
            rest = {k: v for k, v in values.items() if k not in names}
            command(**rest, flags=given)

        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name != "flags"]
        wrapped.__signature__ = inspect.Signature([*kept, *flags])  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in [*kept, *flags]}
        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        return wrapped

    return decorate


def _flag_names(model: type[Settings], name: str, is_switch: bool) -> list[str]:
    """`--batch-size` and `--batch`; a switch also has `--no-…`."""
    names = [name, *(old for old, new in model.aliases.items() if new == name)]
    words = [each.replace("_", "-") for each in names]
    return [f"--{word}/--no-{word}" if is_switch else f"--{word}" for word in words]
