"""`result.json`: the one format that tables and figures are made from (docs/result-format.md)."""

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from dosapp.errors import InputError
from dosapp.experiments.metrics import DEFINITIONS, MATRIX_METRICS, Matrix
from dosapp.runtime.files import read_json, write_bytes, write_json
from dosapp.runtime.plural import plural
from dosapp.settings import LearnerSettings, RunSettings

FORMAT = 1
Cells = list[list[float | None]]


class Result(BaseModel):
    """The result of a run. Accuracies are in per cent; None stands for not measured."""

    model_config = ConfigDict(extra="forbid")

    format: int = FORMAT
    key: str  # hash of everything that determines the result
    settings: dict[str, Any]
    training: dict[str, Any] = {}  # learning rate, epochs and batch size that were used; since 0.3
    hyperparameters: dict[str, Any] = {}  # of the method, with defaults; not in files of 0.1
    label: str  # how tables call it: "SPU + D^u"
    evaluated: str  # the expert whose accuracy is reported
    metrics: dict[str, float | None]
    definitions: dict[str, str]  # the formula of each metric
    R: Cells  # after the stream, of the evaluated expert
    matrices: dict[str, dict[str, Cells]]  # expert → before and after the stream
    forgetting_matrix: Cells
    previous_tasks: dict[str, list[float | None]]  # before, after: accuracy on earlier tasks
    per_class: dict[str, float]  # at the end
    tasks: list[dict[str, Any]]  # classes, and the numbers of images: train, stream, test
    stream: dict[str, Any]  # name, hash, images of each session's D^u, boundaries, left_out
    pseudo_labels: list[float | None]  # per session, accuracy of the adapter's labels
    disagreement: list[float | None]  # per session, share of images the experts disagree on
    distance: dict[str, list[float]]  # ‖θ^T - θ^S‖ after training, after the stream
    steps: dict[str, list[int]]
    seconds: dict[str, list[float]]
    peak_memory: float | None = None  # MB, of the process that finished the run
    backbone: dict[str, str]
    weights: str  # checksum of all that was learned
    libraries: dict[str, str]
    machine: str
    finished: str

    _path: Path | None = PrivateAttr(None)  # of its file, once it has one

    @property
    def matrix(self) -> Matrix:
        """R as an array, with NaN for cells that were not measured."""
        return np.array(self.R, dtype=float)

    def write(self, folder: Path) -> None:
        """Write `R.csv`, then `result.json`: a folder with a result is complete."""
        text = io.StringIO()
        rows = csv.writer(text)
        rows.writerow(["session", *(f"task {j + 1}" for j in range(len(self.R[0])))])
        for t, row in enumerate(self.R):
            rows.writerow([t + 1, *("" if cell is None else f"{cell:.4f}" for cell in row)])
        write_bytes(folder / "R.csv", text.getvalue().encode())
        self._path = folder / "result.json"
        write_json(self._path, self.model_dump(mode="json"))

    @classmethod
    def read(cls, path: Path) -> "Result":
        """Read a result from its file or folder and check its numbers.

        Raises:
            InputError: The file is not a result, or its metrics are not those of its matrix.
        """
        if path.is_dir():
            path = path / "result.json"
        values = read_json(path)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise InputError(
                f"'{path}' is not a result of format {FORMAT}; run it again to get one"
            )
        try:
            result = cls(**values)
        except ValidationError as error:
            raise InputError(
                f"'{path}' is not a complete result ({error.errors()[0]['msg']})"
            ) from error
        result._check_numbers(path)
        result._path = path
        return result

    @property
    def source(self) -> str:
        """The folder of its file, or its key, for messages."""
        return f"'{self._path.parent}'" if self._path else self.key

    def _check_numbers(self, path: Path) -> None:
        """Compare the metrics with their formulas, if the definitions are today's."""
        for name, formula in MATRIX_METRICS.items():
            stated, value = self.metrics.get(name), formula(self.matrix)
            if stated is None or self.definitions.get(name) != DEFINITIONS[name]:
                continue
            if not math.isclose(stated, value, rel_tol=1e-6, abs_tol=1e-6):
                raise InputError(
                    f"'{path}' states {name} {stated:g}, but its own matrix gives {value:g}: it "
                    "was changed; run it again"
                )


def matrix_cells(matrix: Matrix) -> Cells:
    """A matrix as JSON: NaN becomes null."""
    return [[None if np.isnan(x) else float(x) for x in row] for row in matrix]


def full_settings(result: Result) -> dict[str, Any]:
    """All settings of a result by today's names; those added since then have their defaults."""
    return {**RunSettings().model_dump(mode="json"), **RunSettings.rename_aliases(result.settings)}


# Which results may be compared


def check_same_definitions(results: Iterable[Result]) -> None:
    """Raise if two results define a metric differently."""
    first: dict[str, Result] = {}
    for result in results:
        for name, formula in result.definitions.items():
            other = first.setdefault(name, result)
            if other.definitions[name] != formula:
                raise InputError(
                    f"results {other.source} and {result.source} define their metrics differently: "
                    f"{name} is '{other.definitions[name]}' and '{formula}'"
                )


# Settings of the order in which classes are learned.
CLASS_ORDER_SETTINGS = ("class_order", "class_order_seed")


def class_order(result: Result) -> tuple[Any, ...]:
    """The settings of the order of a result's classes."""
    return tuple(full_settings(result)[name] for name in CLASS_ORDER_SETTINGS)


def check_same_tasks(one: Result, two: Result) -> None:
    """Raise if two results have other classes or another number of test images.

    A result on the whole test set may stand beside one on a half, as in a table of the paper, and
    one of another class order beside it, if it has the same classes.
    """
    compared = {"classes": "tasks", "test": "numbers of test images"}
    if full_settings(one)["full_test"] != full_settings(two)["full_test"]:
        del compared["test"]
    if class_order(one) != class_order(two):
        compared = {}
        first, second = (sorted(n for t in r.tasks for n in t["classes"]) for r in (one, two))
        if first != second:
            raise InputError(
                f"results {one.source} and {two.source} are of different classes: "
                f"{describe_difference(one, two)}; report them apart"
            )
    for name, description in compared.items():
        if [t.get(name) for t in one.tasks] != [t.get(name) for t in two.tasks]:
            raise InputError(
                f"results {one.source} and {two.source} are of different {description}: "
                f"{describe_difference(one, two)}; report them apart"
            )


# Settings that shape a scenario: if all are equal, its hash is the hash of the images.
SCENARIO_SETTINGS = set(RunSettings.model_fields) - set(LearnerSettings.model_fields)
SCENARIO_SETTINGS = SCENARIO_SETTINGS - {"data_dir", "stream_batch_size"} | {"seed", "template"}


def describe_difference(one: Result, two: Result) -> str:
    """The settings of the scenario in which two results differ, else their first tasks."""
    first, second = full_settings(one), full_settings(two)
    shaping = sorted(SCENARIO_SETTINGS - {"seed"})
    names = [name for name in shaping if first[name] != second[name]]
    if names:
        return ", ".join(f"{name} is {first[name]} and {second[name]}" for name in names)
    if len(one.tasks) != len(two.tasks):
        return f"{len(one.tasks)} and {len(two.tasks)} tasks"
    pairs = zip(one.tasks, two.tasks, strict=True)
    n, (a, b) = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"task {n + 1} has {_describe_task(a)}, and {_describe_task(b)}"


def _describe_task(task: Mapping[str, Any]) -> str:
    classes = task["classes"]
    names = ", ".join(classes[:3]) + (", …" if len(classes) > 3 else "")
    images = plural(task.get("test", 0), "test image")
    return f"{plural(len(classes), 'class')} ({names}) with {images}"


def check_comparable(results: Sequence[Result]) -> None:
    """Raise if results of a dataset cannot stand in one table.

    They need one backbone, the same tasks, and the same images wherever their settings ask for the
    same. What is trained and streamed may differ: that is what tables vary.
    """
    by_scenario: dict[str, Result] = {}
    for result in results:
        first, settings = results[0], full_settings(result)
        check_same_tasks(first, result)
        if first.backbone.get("fingerprint") != result.backbone.get("fingerprint"):
            raise InputError(
                f"results {first.source} and {result.source} are of different backbones: "
                f"{first.backbone['name']} and {result.backbone['name']}; report them apart"
            )
        shaping = [settings[name] for name in sorted(SCENARIO_SETTINGS)]
        if settings["classes_per_batch"]:  # then the order depends on the size of a batch
            shaping.append(settings["stream_batch_size"])
        other = by_scenario.setdefault(json.dumps([len(result.R), *shaping]), result)
        if other.stream.get("hash") != result.stream.get("hash"):
            raise InputError(
                f"results {other.source} and {result.source} have scenarios with the same "
                "settings but other images; the data has changed between them"
            )


def check_paired(one: Result, two: Result) -> None:
    """Raise if two results cannot be subtracted: they must use the same test images."""
    check_same_definitions([one, two])
    check_comparable([one, two])
    first, second = full_settings(one), full_settings(two)
    for name in ("seed", "test_noise", *CLASS_ORDER_SETTINGS):
        if first[name] != second[name]:
            raise InputError(
                f"results {one.source} and {two.source} are evaluated on different test images: "
                f"{name} is {first[name]} and {second[name]}"
            )
