"""Checks of a machine, a backbone and a dataset, before an afternoon is spent on them."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Example:
        >>> Finding("disk", "ok", "120 GB free").status
        'ok'
    """

    check: str
    status: Literal["ok", "problem"]
    message: str  # one line
    facts: dict[str, Any] = field(default_factory=dict)  # for --json
