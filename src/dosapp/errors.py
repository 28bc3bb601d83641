"""What a user can get wrong, as one exception type."""

import difflib
from collections.abc import Iterable


class InputError(Exception):
    """One sentence: the thing, its value, and what would work. The command line exits with 2."""


def unknown_name(kind: str, name: str, known: Iterable[str], see: str = "") -> InputError:
    """The sentence for a name nobody knows, with the nearest one that exists."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names)}"
    return InputError(f"unknown {kind} '{name}'; {hint}" + (f" (see all: {see})" if see else ""))
