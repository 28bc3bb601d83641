"""Ledgers: our results beside the paper's tables, filled from stored results only.

At the paper's scale numbers are compared with the published ones; at smaller scales the paper's
claims are checked.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dosapp.errors import InputError
from dosapp.experiments.result import Result
from dosapp.paper.ledger.table import Ledger
from dosapp.paper.ledger.timing import TimeLedger
from dosapp.paper.reproduce import Scale, get_table
from dosapp.runtime.files import read_json, write_bytes, write_json


def read_ledgers(
    names: Sequence[str], scale: Scale, folder: Path, measure: bool = False
) -> list[Ledger]:
    """Build the ledgers of some tables; each stored result is read once.

    Args:
        names: Names of tables.
        scale: The scale at which they were run.
        folder: The result store.
        measure: Whether missing times are measured now; nothing else is ever computed.

    Returns:
        One ledger per table.
    """
    cache: dict[str, Result | None] = {}
    kinds = [TimeLedger if get_table(name).kind == "time" else Ledger for name in names]
    return [kind(n, scale, folder, measure, cache) for kind, n in zip(kinds, names, strict=True)]


def format_ledgers(ledgers: Sequence[Ledger]) -> str:
    """The ledgers as one Markdown document."""
    return "\n".join(ledger.markdown() for ledger in ledgers)


def write_ledgers(ledgers: Sequence[Ledger], path: Path) -> None:
    """Write `path.md` and `path.json`.

    Raises:
        InputError: The ledger at this path was filled from more results.
    """
    values, json_path = [ledger.to_dict() for ledger in ledgers], path.with_suffix(".json")
    lost = count_lost_cells(read_json(json_path), values) if json_path.exists() else 0
    if lost:
        raise InputError(
            f"'{json_path}' is kept, because {lost} of its cells would have fewer seeds now; "
            "give the data and settings it was written with, or another --out"
        )
    write_json(json_path, values)
    write_bytes(path.with_suffix(".md"), format_ledgers(ledgers).encode())


def count_lost_cells(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> int:
    """Count the cells that have fewer seeds in the new ledgers than in the old ones."""

    def count_seeds(ledgers: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], int]:
        return {
            (ledger["table"], cell["row"], cell.get("data"), cell.get("metric")): cell.get(
                "seeds", 1
            )
            for ledger in ledgers
            for cell in ledger.get("cells", ledger.get("rows", []))
            if cell["ours"] is not None
        }

    seeds = count_seeds(new)
    return sum(count > seeds.get(cell, 0) for cell, count in count_seeds(old).items())
