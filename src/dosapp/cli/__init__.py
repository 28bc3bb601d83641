"""The commands. Parsing and printing only; everything heavy is imported when it is needed."""

import os
import sys
import warnings

from dosapp.cli.console import app, err
from dosapp.errors import DosappError, InputError
from dosapp.runtime.process_memory import retain_freed_memory

# `dosapp --help` has this order
# isort: off
from dosapp.cli import experiments, catalogue, learners, serving, maintenance  # noqa: F401
# isort: on


def main() -> None:
    """The one place where a user's mistake becomes a sentence and exit code 2."""
    retain_freed_memory()  # before there are threads
    if os.environ.get("RANK", "0") != "0":  # of several processes under torchrun the first speaks
        sys.stdout, err.quiet = open(os.devnull, "w"), True  # noqa: SIM115
    warnings.showwarning = lambda message, *_: err.print(f"note: {message}")
    try:
        app()
    except DosappError as error:
        err.print(f"dosapp: {error}")
        sys.exit(2 if isinstance(error, InputError) else 1)
    except OSError as error:
        where = error.filename or "the disk"
        err.print(f"dosapp: cannot use '{where}' ({error.strerror})")
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("stopped; run the same again to go on (a run with --out: and --resume)")
        sys.exit(130)
