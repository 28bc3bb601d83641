"""`result.json`: the one format every table and figure is drawn from. See docs/result-format.md."""

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from dosapp.errors import BadInput
from dosapp.metrics import Matrix
from dosapp.storage import read_json, write_bytes, write_json

FORMAT = 1
Cells = list[list[float | None]]


class Result(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: int = FORMAT
    key: str  # hash of everything that determines the result
    settings: dict[str, Any]
    label: str  # how tables call it: "SPU + D^u"
    evaluated: str  # the expert whose accuracy is reported
    metrics: dict[str, float | None]  # per cent
    definitions: dict[str, str]  # the formula of each metric
    R: Cells  # after the stream, of the evaluated expert; null where not measured
    matrices: dict[str, dict[str, Cells]]  # expert → before, after the stream
    forgetting_matrix: Cells
    previous_tasks: dict[str, list[float | None]]  # before, after: accuracy on earlier tasks
    per_class: dict[str, float]  # at the end
    tasks: list[dict[str, Any]]  # classes, train, test, dataset boundary
    stream: dict[str, Any]  # name, hash, length and steps of each session's D^u
    pseudo_labels: list[float | None]  # per session, accuracy of the labels the adapter used
    disagreement: list[float | None]  # per session, share of images the experts differ on
    distance: dict[str, list[float]]  # ‖θ^T - θ^S‖ after lessons, after the stream
    steps: dict[str, list[int]]
    seconds: dict[str, list[float]]
    peak_memory: float | None = None  # MB, of the process that finished the run
    backbone: dict[str, str]
    weights: str  # checksum of all that was learned
    libraries: dict[str, str]
    machine: str
    finished: str

    @property
    def matrix(self) -> Matrix:
        return np.array(self.R, dtype=float)

    def write(self, folder: Path) -> None:
        """`R.csv` first, `result.json` last: a folder with a result has everything."""
        text = io.StringIO()
        rows = csv.writer(text)
        rows.writerow(["session", *(f"task {j + 1}" for j in range(len(self.R[0])))])
        for t, row in enumerate(self.R):
            rows.writerow([t + 1, *("" if cell is None else f"{cell:.4f}" for cell in row)])
        write_bytes(folder / "R.csv", text.getvalue().encode())
        write_json(folder / "result.json", self.model_dump(mode="json"))

    @classmethod
    def read(cls, path: Path) -> "Result":
        if path.is_dir():
            path = path / "result.json"
        values = read_json(path)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise BadInput(f"'{path}' is not a result of format {FORMAT}; run it again to get one")
        try:
            return cls(**values)
        except ValidationError as error:
            raise BadInput(
                f"'{path}' is not a whole result ({error.errors()[0]['msg']})"
            ) from error


def cells(matrix: Matrix) -> Cells:
    """NaN → null."""
    return [[None if np.isnan(x) else float(x) for x in row] for row in matrix]
