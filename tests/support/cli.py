"""The command line inside the test process."""

import contextlib
import io
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from dosapp.cli import main
from support.settings import SMALL

FLAGS = [word for k, v in SMALL.items() for word in (f"--{k.replace('_', '-')}", str(v))]


@dataclass(frozen=True)
class Said:
    stdout: str
    stderr: str


def dosapp(*words: object, cwd: Path = Path(), code: int = 0) -> Said:
    """The command, in this process: what `main` does, prints and exits with."""
    out, err = io.StringIO(), io.StringIO()
    returned = 0
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
        pytest.MonkeyPatch.context() as patch,
    ):
        warnings.simplefilter("default")
        patch.setattr(sys, "argv", ["dosapp", *map(str, words)])
        patch.setenv("COLUMNS", "200")
        try:
            main()
        except SystemExit as exit:
            returned = exit.code or 0
    assert returned == code, err.getvalue()
    return Said(out.getvalue(), err.getvalue())
