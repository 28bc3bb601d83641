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

FLAGS = [part for k, v in SMALL.items() for part in (f"--{k.replace('_', '-')}", str(v))]


@dataclass(frozen=True)
class Output:
    stdout: str
    stderr: str


def dosapp(*arguments: object, cwd: Path = Path(), code: int = 0) -> Output:
    """Run a command in this process, check its exit code and return what it printed."""
    out, err = io.StringIO(), io.StringIO()
    exit_code = 0
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
        pytest.MonkeyPatch.context() as patch,
    ):
        warnings.simplefilter("default")
        patch.setattr(sys, "argv", ["dosapp", *map(str, arguments)])
        patch.setenv("COLUMNS", "200")
        try:
            main()
        except SystemExit as exit:
            exit_code = exit.code or 0
    assert exit_code == code, err.getvalue()
    return Output(out.getvalue(), err.getvalue())
