"""The command line: parsing and printing. Commands import torch only when they run."""

import errno
import os
import sys
import warnings

from dosapp.cli.console import app, err
from dosapp.errors import DosappError, InputError
from dosapp.runtime.process_memory import retain_freed_memory

# `dosapp --help` has this order
# isort: off
from dosapp.cli import experiments, study, catalogue, data, doctor  # noqa: F401
from dosapp.cli import learners, serving, storage, maintenance  # noqa: F401
# isort: on


def main() -> None:
    """Run a command; errors become one sentence on stderr.

    Exit codes: 2 for wrong input, 1 for every other error, 130 after Ctrl-C.
    """
    retain_freed_memory()  # before any thread starts
    os.environ.setdefault("DOSAPP_NO_PROGRESS", "1")  # commands have displays of their own
    if os.environ.get("RANK", "0") != "0":  # under torchrun only the first process prints
        sys.stdout, err.quiet = open(os.devnull, "w"), True  # noqa: SIM115
    warnings.showwarning = lambda message, *_: err.print(f"note: {message}")
    try:
        app()
    except DosappError as error:
        err.print(f"dosapp: {error}")
        sys.exit(2 if isinstance(error, InputError) else 1)
    except OSError as error:
        if error.filename is None:
            err.print(f"dosapp: {type(error).__name__}: {error}")
            sys.exit(1)
        err.print(f"dosapp: cannot use '{error.filename}' ({error.strerror})")
        sys.exit(1 if error.errno in (errno.ENOSPC, errno.EIO) else 2)
    except SystemExit as end:
        if end.code == 130:  # typer ends so after Ctrl-C
            err.print("stopped; the same command continues it (a run with --out needs --resume)")
        raise
