"""What came out, beside the paper: ledgers of stored results.

A cell is filled from a stored result or not at all. At the paper's scale a number is set against
the paper's, at the smaller ones its claims are.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dosapp.errors import InputError
from dosapp.experiments.result import Result
from dosapp.paper.ledger.table import Ledger
from dosapp.paper.ledger.timing import TimeLedger
from dosapp.paper.reproduce import Scale, table
from dosapp.runtime.files import read_json, write_bytes, write_json


def open_ledgers(
    names: Sequence[str], scale: Scale, folder: Path, measure: bool = False
) -> list[Ledger]:
    """The ledgers of some tables, each result read once."""
    read: dict[str, Result | None] = {}
    kinds = [TimeLedger if table(name).kind == "time" else Ledger for name in names]
    return [kind(n, scale, folder, measure, read) for kind, n in zip(kinds, names, strict=True)]


def markdown(ledgers: Sequence[Ledger]) -> str:
    return "\n".join(ledger_table.markdown() for ledger_table in ledgers)


def write(ledgers: Sequence[Ledger], place: Path) -> None:
    """`.md` and `.json`, but never instead of ones that were filled from more."""
    facts, listing = [ledger_table.facts() for ledger_table in ledgers], place.with_suffix(".json")
    fewer = lost(read_json(listing), facts) if listing.exists() else 0
    if fewer:
        raise InputError(
            f"{listing} stays as it is, since {fewer} of its cells would have fewer seeds now; "
            "give the data and settings it was made with, or another --out"
        )
    write_json(listing, facts)
    write_bytes(place.with_suffix(".md"), markdown(ledgers).encode())


def lost(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> int:
    """Cells of some ledgers that were filled from more seeds than they are now."""

    def seeds(ledgers: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], int]:
        return {
            (ledger_table["table"], cell["row"], cell.get("data"), cell.get("metric")): cell.get(
                "seeds", 1
            )
            for ledger_table in ledgers
            for cell in ledger_table.get("cells", ledger_table.get("rows", []))
            if cell["ours"] is not None
        }

    now = seeds(new)
    return sum(count > now.get(cell, 0) for cell, count in seeds(old).items())
