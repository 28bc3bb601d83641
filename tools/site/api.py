"""The reference of `import dosapp`, from signatures and docstrings."""

import inspect
import re
import textwrap
from typing import Any

from pydantic import BaseModel

import dosapp

MODULE = re.compile(r"\b(?:[a-z_]+\.)+(?=[A-Z])")  # of a class in a signature
SECTION = re.compile(r"^(Args|Returns|Raises|Example|Attributes|Yields):$", flags=re.MULTILINE)


def write_api() -> str:
    """One section for each public name, in the order of the stub."""
    lines = ["# Python", "", "`from dosapp import …`. Every example runs in the tests.", ""]
    for name, module in dosapp.PUBLIC.items():
        value = getattr(dosapp, name)
        lines += [f"## {name}", "", f"*{module}*", ""]
        if not callable(value):
            lines += ["Name → class of every method: see [methods](../methods/index.md).", ""]
            continue
        lines += [*_signature(name, value), *_docstring(value)]
        if inspect.isclass(value):
            lines += [*_fields(value), *_members(value)]
    return "\n".join(lines)


def _signature(name: str, value: Any) -> list[str]:
    if inspect.isclass(value) and issubclass(value, BaseModel | Exception):
        return []
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return []
    parameters = [str(p) for p in signature.parameters.values()]
    returned = (
        "" if inspect.isclass(value) else inspect.formatannotation(signature.return_annotation)
    )
    arrow = f" -> {returned}" if returned and "inspect._empty" not in returned else ""
    parameters = [MODULE.sub("", parameter) for parameter in parameters]
    arrow = MODULE.sub("", arrow)
    line = f"{name}({', '.join(parameters)}){arrow}"
    if len(line) > 90:
        line = f"{name}(\n" + "".join(f"    {p},\n" for p in parameters) + f"){arrow}"
    return ["```python", line, "```", ""]


def _docstring(value: Any) -> list[str]:
    text = inspect.getdoc(value) or ""
    first, *rest = SECTION.split(text)
    lines = [_prose(first), ""]
    for title, indented in zip(rest[::2], rest[1::2], strict=True):
        body = textwrap.dedent(indented.strip("\n"))
        lines += [f"**{title}**", ""]
        if title == "Example":
            lines += ["```pycon", body.rstrip(), "```", ""]
        elif title in ("Args", "Raises", "Attributes"):
            items = re.split(r"\n(?=\S)", body.strip())
            lines += [_item(item) for item in items] + [""]
        else:
            lines += [_prose(body), ""]
    return lines


def _item(text: str) -> str:
    name, _, meaning = " ".join(text.split()).partition(": ")
    return f"- `{name}`: {_prose(meaning)}"


def _prose(text: str) -> str:
    """Angle brackets outside code would be read as HTML."""
    parts = re.split(r"(`[^`]*`)", text.strip())
    return "".join(p if p.startswith("`") else p.replace("<", "&lt;") for p in parts)


def _fields(cls: type) -> list[str]:
    if not issubclass(cls, BaseModel):
        return []
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in cls.model_fields.items():
        default = "" if field.is_required() else f"`{field.get_default(call_default_factory=True)}`"
        meaning = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{name}` | {default.replace('|', chr(92) + '|')} | {_prose(meaning)} |")
    return [*lines, ""]


def _members(cls: type) -> list[str]:
    lines: list[str] = []
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", member)
        is_method = inspect.isfunction(function) or isinstance(member, property)
        if name.startswith("_") or not is_method or not inspect.getdoc(getattr(cls, name)):
            continue
        lines += [f"### {cls.__name__}.{name}", ""]
        if isinstance(member, property):
            lines += _docstring(member)
        else:
            lines += [*_signature(name, getattr(cls, name)), *_docstring(getattr(cls, name))]
    return lines


PAGES = {"reference/python.md": write_api}
