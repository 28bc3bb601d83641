"""Errors by kind. Every message is one sentence: what is wrong, its value, what would work."""

import difflib
from collections.abc import Iterable


class DosappError(Exception):
    """Base class of all errors that dosapp raises on purpose.

    The command line exits with 2 for an `InputError` and with 1 for every other kind. The service
    answers 4xx for what a caller can change and 5xx for what an operator must look at.
    """


class InputError(DosappError):
    """A value, file or name given by the user cannot be used (exit code 2, HTTP 400)."""


class TooLargeError(InputError):
    """The input exceeds a limit of the service (HTTP 413)."""


class CorruptRecordError(DosappError):
    """A file does not hold the bytes that were written to it, or is missing (HTTP 500)."""


class StorageError(DosappError):
    """A file cannot be written, for example because the disk is full (HTTP 507)."""


class DivergedError(DosappError):
    """A loss or gradient became infinite or NaN; the learning rate is too large (HTTP 500)."""


class BusyError(DosappError):
    """A queue is full, a folder is locked or the writer is stopping; nothing changed (HTTP 429)."""


class UnavailableError(DosappError):
    """The writer has ended, so nothing can change until a restart (HTTP 503)."""


class ReadOnlyError(DosappError):
    """A replica was asked to change the learner (HTTP 409)."""


def unknown_name(kind: str, name: str, known: Iterable[str], see: str = "") -> InputError:
    """Build the error for an unknown name, with the closest known one as a hint.

    Args:
        kind: What the name is meant to be, for example "method".
        name: The name that was given.
        known: All names that would work.
        see: A command that lists them.

    Returns:
        The error, to be raised by the caller.

    Example:
        >>> unknown_name("method", "dosap", ["dosapp", "spu"])
        InputError("unknown method 'dosap'; did you mean 'dosapp'?")
    """
    names = sorted(known)
    closest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean '{closest[0]}'?" if closest else f"known: {', '.join(names)}"
    return InputError(f"unknown {kind} '{name}'; {hint}" + (f" (see all: {see})" if see else ""))
