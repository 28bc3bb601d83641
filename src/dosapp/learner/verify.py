"""Check every file of a learner's folder, without its backbone, while it may be served."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from dosapp.errors import CorruptRecordError, DosappError
from dosapp.history.history import History
from dosapp.learner.learner_folder import LearnerDescription
from dosapp.learner.state import is_weight
from dosapp.runtime.files import file_stamp, list_names, read_bytes, read_json

ATTEMPTS = 20  # while a service writes the folder

T = TypeVar("T")


def find_problems(folder: Path) -> list[str]:
    """Read all that a folder holds, and return one sentence for each problem.

    Args:
        folder: Of a learner, or a backup of one. It may be served at the same time.

    Returns:
        The problems; empty if every file is as it was written.
    """
    return read_while_still(folder, lambda: list(_find_problems(folder)), lambda found: not found)


def read_while_still(folder: Path, read: Callable[[], T], is_good: Callable[[T], bool]) -> T:
    """Read a folder again if the reading failed because a service changed it meanwhile."""
    for attempt in range(ATTEMPTS):
        before = _stamp(folder)
        result = read()
        if is_good(result) or attempt == ATTEMPTS - 1 or _stamp(folder) == before:
            break
    return result


def _stamp(folder: Path) -> list[object]:
    """Differs if a record was written, merged or removed in between."""
    paths = [folder / "working.safetensors"]
    paths += [folder / "versions" / name for name in list_names(folder / "versions")]
    return [file_stamp(path) for path in paths]


def _find_problems(folder: Path) -> Iterator[str]:
    try:
        description = LearnerDescription.read(folder)
        description.learner_settings(folder, "cpu")
    except DosappError as error:
        yield str(error)
    yield from History(folder, lambda key: None).find_problems(_check_finite)
    known = {"learner.json", "working.safetensors", "versions", ".lock"}
    for name in sorted(set(list_names(folder)) - known):
        if not name.startswith("."):
            try:
                _check_file(folder / name)
            except (FileNotFoundError, IsADirectoryError):
                continue
            except DosappError as error:
                yield str(error)


def _check_finite(tensors: Mapping[str, Tensor], path: Path) -> None:
    for key, tensor in tensors.items():
        if is_weight(key) and not bool(torch.isfinite(tensor).all()):
            raise CorruptRecordError(f"'{path}' gives '{key}' values that are not finite numbers")


def _check_file(path: Path) -> None:
    """Check a file that only the service knows, as far as its kind allows."""
    if path.is_dir():
        return
    if path.suffix == ".json":
        read_json(path)
    elif path.suffix == ".jsonl":
        for number, line in enumerate(read_bytes(path).splitlines(), start=1):
            try:
                json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CorruptRecordError(
                    f"line {number} of '{path}' is not JSON; a crash may have cut it off"
                ) from error
    elif path.suffix == ".safetensors":
        try:
            load(read_bytes(path))
        except SafetensorError as error:
            raise CorruptRecordError(f"'{path}' is torn ({error})") from error
