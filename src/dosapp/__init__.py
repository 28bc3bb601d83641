"""Dual-phase continual learning for vision-language models.

The public names are listed in `__init__.pyi`. They are imported when they are first used, so that
`dosapp --help` does not import torch.
"""

import ast
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
PUBLIC = {  # name → the module that defines it
    alias.name: str(statement.module)
    for statement in _STUB.body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}

try:
    __version__ = version("dosapp")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "unknown"
__all__ = ["__version__", *PUBLIC]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'dosapp' has no attribute '{name}'")
    return getattr(import_module(PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
