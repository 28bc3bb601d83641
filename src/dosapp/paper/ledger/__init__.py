"""Ledgers: our results beside the paper's tables, filled from stored results only.

At the paper's scale numbers are compared with the published ones; at smaller scales the paper's
claims are checked.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dosapp.errors import InputError
from dosapp.experiments.result import Result
from dosapp.paper.ledger.table import FORGETTING_DEFINITIONS, Ledger
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
    return "\n".join([ledger.markdown() for ledger in ledgers] + compare_forgetting(ledgers))


def compare_forgetting(ledgers: Sequence[Ledger]) -> list[str]:
    """Say which definition of F fits the published values better, over all cells of all tables.

    Returns:
        Lines of Markdown; none where no published F stands beside ours.
    """
    errors: dict[str, list[float]] = {name: [] for name in FORGETTING_DEFINITIONS}
    for ledger in ledgers:
        for name, values in ledger.forgetting_errors().items():
            errors[name] += values
    if not all(errors.values()):
        return []
    means = {name: float(np.mean(np.abs(values))) for name, values in errors.items()}
    lines = ["## Which definition of F fits the published values", ""]
    for name, text in FORGETTING_DEFINITIONS.items():
        count, mean = len(errors[name]), means[name]
        lines.append(f"- {text} (`{name}`): {mean:.1f} points away on average, {count} cells")
    best = min(means, key=lambda name: means[name])
    text = FORGETTING_DEFINITIONS[best]
    return [*lines, "", f"{text[0].upper()}{text[1:]} fits better.", ""]


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
