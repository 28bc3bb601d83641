"""Command-line flags from settings models: each setting is described once, in its model."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from dosapp.settings import Settings


def with_settings(
    model: type[Settings], without: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command with one flag per field of a settings model.

    The names of version 0.1 are flags too, without a line in `--help`. The decorated command gets
    the given values as `flags`, by today's names.

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
        names = {flag.name for flag in flags}

        def wrapped(**values: Any) -> None:
            given = {k: v for k, v in values.items() if k in names and v is not None}
            rest = {k: v for k, v in values.items() if k not in names}
            command(**rest, flags=model.rename_aliases(given))

        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name != "flags"]
        wrapped.__signature__ = inspect.Signature([*kept, *flags])  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in [*kept, *flags]}
        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        return wrapped

    return decorate


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
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )
