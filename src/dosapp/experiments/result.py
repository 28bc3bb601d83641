"""`result.json`: the one format every table and figure is drawn from. See docs/result-format.md."""

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from dosapp.errors import InputError
from dosapp.experiments.metrics import DEFINITIONS, OF_R, Matrix
from dosapp.runtime.files import read_json, write_bytes, write_json
from dosapp.settings import LearnerSettings, RunSettings

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
    tasks: list[dict[str, Any]]  # classes, and how many pictures: train, stream, test
    stream: dict[str, Any]  # name, hash, images of each session's D^u, boundaries, left_out
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
            raise InputError(
                f"'{path}' is not a result of format {FORMAT}; run it again to get one"
            )
        try:
            found = cls(**values)
        except ValidationError as error:
            raise InputError(
                f"'{path}' is not a whole result ({error.errors()[0]['msg']})"
            ) from error
        found._check_numbers(path)
        return found

    def _check_numbers(self, path: Path) -> None:
        """What it says of its matrix is what the formulas say, if it means the same by them."""
        for name, formula in OF_R.items():
            said, value = self.metrics.get(name), formula(self.matrix)
            if said is None or self.definitions.get(name) != DEFINITIONS[name]:
                continue
            if not math.isclose(said, value, rel_tol=1e-6, abs_tol=1e-6):
                raise InputError(
                    f"'{path}' says {name} {said:g}, but its own matrix gives {value:g}: it has "
                    "been changed; run it again"
                )


def cells(matrix: Matrix) -> Cells:
    """NaN → null."""
    return [[None if np.isnan(x) else float(x) for x in row] for row in matrix]


# What may be compared


def full_settings(result: Result) -> dict[str, Any]:
    """With those that came after the result was written: they were off."""
    return {**RunSettings().model_dump(mode="json"), **result.settings}


def check_same_definitions(results: Iterable[Result]) -> None:
    """One table has one meaning for each of its columns."""
    first: dict[str, Result] = {}
    for result in results:
        for name, formula in result.definitions.items():
            other = first.setdefault(name, result)
            if other.definitions[name] != formula:
                raise InputError(
                    f"results {other.key} and {result.key} define their metrics differently: "
                    f"{name} is '{other.definitions[name]}' and '{formula}'"
                )


def check_same_tasks(one: Result, two: Result) -> None:
    """The same classes in the same order, and as many pictures to ask about; or one is asked about
    the whole test set and one about its half, as in a table of the paper."""
    compared = {"classes": "tasks", "test": "numbers of test pictures"}
    if full_settings(one)["full_test"] != full_settings(two)["full_test"]:
        del compared["test"]
    for what, words in compared.items():
        if [t.get(what) for t in one.tasks] != [t.get(what) for t in two.tasks]:
            raise InputError(
                f"results {one.key} and {two.key} are of different {words}; report them apart"
            )


# Settings that shape a stream: with all of them equal, its hash is the hash of the pictures.
SHAPE = set(RunSettings.model_fields) - set(LearnerSettings.model_fields)
SHAPE = SHAPE - {"data_dir", "stream_batch"} | {"seed", "caption"}


def check_comparable(results: Sequence[Result]) -> None:
    """What one table may hold of a dataset: one backbone, the same tasks, and the same pictures
    wherever the same were asked for. What was taught and streamed may differ (no stream, a part of
    it, noise on it, a memory, joint training): that is what tables vary."""
    alike: dict[str, Result] = {}
    for result in results:
        first, said = results[0], full_settings(result)
        check_same_tasks(first, result)
        if first.backbone.get("fingerprint") != result.backbone.get("fingerprint"):
            raise InputError(
                f"results {first.key} and {result.key} are of different backbones: "
                f"{first.backbone['name']} and {result.backbone['name']}; report them apart"
            )
        shape = json.dumps([len(result.R), *(said[name] for name in sorted(SHAPE))])
        other = alike.setdefault(shape, result)
        if other.stream.get("hash") != result.stream.get("hash"):
            raise InputError(
                f"results {other.key} and {result.key} have streams with the same settings but "
                "other pictures; the data has changed between them"
            )


def check_paired(one: Result, two: Result) -> None:
    """Two results can be subtracted if they say the same of the same test halves. The seed halves
    the test part, and noise may be put on it."""
    check_same_definitions([one, two])
    check_comparable([one, two])
    mine, theirs = full_settings(one), full_settings(two)
    for name in ("seed", "test_noise"):
        if mine[name] != theirs[name]:
            raise InputError(
                f"results {one.key} and {two.key} are asked about different test pictures: "
                f"{name} is {mine[name]} and {theirs[name]}"
            )
