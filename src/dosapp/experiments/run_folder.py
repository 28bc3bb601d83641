"""The folder of a run: what is in it, and how a run that was computed again replaces it."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dosapp.errors import InputError
from dosapp.experiments.plan import Plan
from dosapp.runtime import distributed
from dosapp.runtime.files import ensure_dir, file_stamp, lock_folder, read_json
from dosapp.runtime.plural import plural

FORCE_LOCK = ".force"  # folder in a run's folder, locked while the run is computed again


def check_run_folder(folder: Path, resume: bool) -> dict[str, Any] | None:
    """Read `run.json`, before anything is loaded.

    Args:
        folder: The folder of a run.
        resume: Whether a run in it is continued.

    Returns:
        What is known of the run; None if there is none yet.

    Raises:
        InputError: The folder holds a run that is not to be continued, or something else.
    """
    path = folder / "run.json"
    if not path.exists():
        others = [p for p in folder.iterdir() if p.name[0] != "."] if folder.exists() else []
        if others and [p.name for p in others] != ["error.log"]:
            raise InputError(f"'{folder}' is not empty and holds no run; choose another --out")
        return None
    if not resume:
        raise InputError(f"'{folder}' already holds a run; add --resume to continue it")
    known: dict[str, Any] = read_json(path)
    return known


def check_same_run(
    folder: Path, identity: Mapping[str, Any], resume: bool
) -> dict[str, Any] | None:
    """Read `run.json` of a run that is to be computed.

    Args:
        folder: The folder of a run.
        identity: What determines the result of the run.
        resume: Whether a run in it is continued.

    Returns:
        What is known of the run; None if there is none yet.

    Raises:
        InputError: The folder holds another run, one that is not to be continued, or something
            else; or the run was started with another number of processes.
    """
    known = check_run_folder(folder, resume)
    if known is None:
        return None
    if known.get("identity") != json.loads(json.dumps(identity)):
        raise InputError(f"'{folder}' holds a run with other settings; choose another --out")
    processes = known.get("processes", 1)
    if processes != distributed.world_size() and not (folder / "result.json").exists():
        raise InputError(
            f"'{folder}' was started with {plural(processes, 'process')}; continue it with as many"
        )
    return known


@contextmanager
def compute_again(planned: Plan, folder: Path, wait: bool = False) -> Iterator[Path | None]:
    """Compute a stored run again; it replaces the stored one when the block ends without an error.

    The stored one stays until then, so a failure loses nothing.

    Args:
        planned: The run.
        folder: Where it is stored.
        wait: Wait for another process that computes it again, instead of raising.

    Yields:
        Where to compute it; None if another process replaced the stored one meanwhile.

    Raises:
        BusyError: Another process computes it again.
        InputError: The folder holds something else, or there are several processes.
    """
    if distributed.world_size() > 1:
        raise InputError("--force works in one process; delete the folder of the run instead")
    if not (folder / "run.json").exists():
        raise InputError(f"'{folder}' holds no run, so --force does not replace it")
    check_same_run(folder, planned.identity, resume=True)
    stored = file_stamp(folder / "result.json")
    with lock_folder(ensure_dir(folder / FORCE_LOCK), wait):
        if file_stamp(folder / "result.json") != stored:
            yield None
            return
        again = folder.with_name(folder.name + ".forced")
        yield again
        _replace_run(again, folder)


def _replace_run(new: Path, old: Path) -> None:
    """Put a run that was computed again in the place of the old one."""
    with lock_folder(old), lock_folder(ensure_dir(old / "learner")):
        for path in old.iterdir():
            if path.name in (".lock", FORCE_LOCK):
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in new.iterdir():
            if path.name != ".lock":
                shutil.move(path, old / path.name)
    shutil.rmtree(new)
