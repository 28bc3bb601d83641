"""The reference of commands, from the command line itself."""

from typing import Any

import typer

from dosapp.cli import app


def write_commands() -> str:
    """One section for each command, with its arguments and options."""
    group = typer.main.get_command(app)
    lines = ["# Commands", "", "`dosapp COMMAND --help` prints the same.", ""]
    for name, command in _flatten(group, "dosapp"):
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        words = [p.name.upper() if p.required else f"[{p.name.upper()}]" for p in arguments]
        lines += [
            f"## {name.removeprefix('dosapp ')}",
            "",
            f"`{' '.join([name, *words])} [OPTIONS]`",
        ]
        lines += ["", command.help or "", ""]
        rows = [_describe(p) for p in command.params if not p.hidden and p.name != "help"]
        if rows:
            lines += ["| argument or option | meaning |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _flatten(group: Any, prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, command in group.commands.items():
        path = f"{prefix} {name}"
        found += _flatten(command, path) if hasattr(command, "commands") else [(path, command)]
    return found


def _describe(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    names = [parameter.name.upper()] if is_argument else parameter.opts + parameter.secondary_opts
    meaning = parameter.help or ""
    if parameter.required:
        meaning += " (required)"
    elif parameter.show_default and str(parameter.default) not in ("None", "False", "()", "[]"):
        meaning += f" [{parameter.default}]"
    shown = ", ".join(f"`{name}`" for name in names)
    return f"| {shown} | {_escape(meaning.strip())} |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


PAGES = {"reference/commands.md": write_commands}
