"""The paper's datasets from the hub, through the `datasets` package."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dosapp.data.base import Dataset, Part, Rows
from dosapp.data.files import Prepare
from dosapp.data.known import Known
from dosapp.errors import BadInput


def hub_data(name: str, prepare: Prepare) -> Dataset:
    """The same from the hub; cached there by its own library."""
    known = Known.named(name)
    try:
        import datasets
    except ImportError as error:
        raise BadInput(
            f"{name} is not on this machine: give --data-dir, or pip install 'dosapp[hub]' to get "
            f"it from the hub ({known.hub['train'][0]})"
        ) from error
    parts = []
    for split in ("train", "test"):
        where, part_of = known.hub[split]
        try:
            table = datasets.load_dataset(where, split=part_of)
        except Exception as error:  # the library raises many kinds
            raise BadInput(
                f"{name} could not be loaded from the hub ({where}: {error}); give --data-dir"
            ) from error
        column = table.features[known.hub["label"]]
        names = list(getattr(column, "names", None) or known.classes)
        said = known.labels(names, where)  # its own order may be another
        place = np.array([list(known.classes).index(said[name]) for name in names])
        rows = Column(table, known.hub["image"], f"{where}/{part_of}", prepare)
        parts.append(Part(rows, place[np.asarray(table[known.hub["label"]], dtype=np.int64)]))
    return known.dataset(parts[0], parts[1], known.hub["train"][0])


@dataclass(frozen=True)
class Column:
    """The pictures of a table of the `datasets` library."""

    table: Any
    column: str
    title: str
    prepare: Prepare

    def __len__(self) -> int:
        return len(self.table)

    def read(self, rows: Sequence[int] | Rows) -> Tensor:
        return torch.stack([self.decode(int(row)) for row in rows])

    def decode(self, row: int) -> Tensor:
        return self.prepare(self.table[row][self.column])

    def key(self, row: int) -> str:
        return f"{self.title}/{row}:{self.table._fingerprint}"

    def check(self) -> None: ...
