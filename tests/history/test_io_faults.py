"""Every storage call fails once, as SQLite tests it: nothing that was acknowledged is lost."""

import contextlib
import errno
import itertools
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dosapp.errors import CorruptRecordError, DosappError, StorageError
from dosapp.history.history import History
from dosapp.history.record import State, compute_checksum
from dosapp.learner.learner_folder import load_latest
from dosapp.runtime import files
from dosapp.runtime.files import lock_folder
from support.faults import Mode, failing_call

VERSIONS = 4


def state(number: int) -> State:
    weights = torch.zeros(64)
    weights[:number] = number
    return State({"student/w": weights, "method/n": torch.tensor(number)}, {"steps": number})


def open_history(folder: Path) -> History:
    return History(folder, lambda key: None)


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """A folder with four versions."""
    folder: Path = tmp_path_factory.mktemp("template") / "x"
    history = open_history(folder)
    for number in range(1, VERSIONS + 1):
        history.append(state(number), State({"optimizer/m": torch.ones(3)}), f"version {number}")
    return folder


def append(history: History) -> int:
    return history.append(state(9), State({"optimizer/m": torch.ones(3)}), "new")


def rollback(history: History) -> int:
    return history.append(history.at(2), State(), "rolled back")


def prune(history: History) -> None:
    history.prune(2)


def checkpoint(history: History) -> None:
    history.checkpoint(state(VERSIONS), State({"optimizer/m": torch.zeros(3)}))


def tear(folder: Path) -> None:
    """The newest version is torn, so that the next write sets it aside."""
    path = folder / "versions" / f"{VERSIONS:06d}.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


OPERATIONS: dict[str, Callable[[History], int | None]] = {
    "append": append,
    "rollback": rollback,
    "prune": prune,
    "checkpoint": checkpoint,
}


def write_with_fault(
    history: History, operation: Callable[[History], int | None], call: int, mode: Mode
) -> tuple[bool, int | None]:
    """Resume and write; returns whether call number `call` was made, and what was acknowledged."""
    message, acknowledged = "", None
    with failing_call(call, mode) as faulty:
        try:
            load_latest(history)
            acknowledged = operation(history)
        except DosappError as error:
            message = str(error)
    assert "\n" not in message
    return faulty.calls >= call, acknowledged


def check_restart(folder: Path, acknowledged: int | None, exact: bool) -> None:
    """All acknowledged versions can be read and are what they were; the head did not go back."""
    history = open_history(folder)
    head = history.head
    assert head >= (acknowledged or VERSIONS)
    if exact:  # reported and real outcome are the same
        assert head == (acknowledged or VERSIONS)
    first = history.versions()[0].number
    assert first in (1, VERSIONS - 1)  # the second: pruned
    for number in range(first, VERSIONS + 1):
        assert compute_checksum(history.at(number)) == compute_checksum(state(number))
    resumed, _ = history.resume()
    assert compute_checksum(resumed) == compute_checksum(history.at(head))


@pytest.mark.parametrize("mode", ["before", "after", "gone"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_failing_call_loses_a_version(name, mode, template, tmp_path) -> None:
    for call in itertools.count(1):
        folder = tmp_path / str(call)
        shutil.copytree(template, folder)
        with lock_folder(folder) as lock:
            history = open_history(folder)
            history.begin_writing(lock)
            was_made, acknowledged = write_with_fault(history, OPERATIONS[name], call, mode)
            check_restart(folder, acknowledged, exact=mode != "gone")
            if acknowledged is None and mode != "gone":
                assert append(history) == VERSIONS + 1  # the same writer goes on
                check_restart(folder, VERSIONS + 1, exact=True)
        if not was_made:
            break
        with lock_folder(folder) as lock:  # and so does the next one
            history = open_history(folder)
            history.begin_writing(lock)
            assert append(history) == history.head
        left = [p for p in folder.rglob(".*") if p.name != ".lock"]
        assert left == []
        shutil.rmtree(folder)
    assert call > 20  # there were that many calls


@pytest.mark.parametrize("mode", ["before", "after", "gone"])
def test_the_first_save_fails_at_every_call(mode, tmp_path) -> None:
    for call in itertools.count(1):
        folder = tmp_path / str(call)
        folder.mkdir()
        with failing_call(call, mode) as faulty:
            try:
                acknowledged = append(open_history(folder))
            except DosappError:
                acknowledged = None
        if acknowledged:
            assert compute_checksum(open_history(folder).at(1)) == compute_checksum(state(9))
        elif mode != "gone":
            assert not (folder / "working.safetensors").exists()
        if faulty.calls < call:
            break


def test_a_torn_version_is_set_aside_or_stays_whatever_fails(template, tmp_path) -> None:
    for call in itertools.count(1):
        folder = tmp_path / str(call)
        shutil.copytree(template, folder)
        tear(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            was_made, acknowledged = write_with_fault(open_history(folder), append, call, "before")
            history = open_history(folder)
            load_latest(history)
        for number in range(1, VERSIONS):
            assert compute_checksum(history.at(number)) == compute_checksum(state(number))
        found = list((folder / "versions").glob(f"{VERSIONS:06d}*"))
        assert found  # nothing is deleted
        if acknowledged:
            assert compute_checksum(history.at(acknowledged)) == compute_checksum(state(9))
        if not was_made:
            break


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.EACCES, errno.ESTALE])
def test_a_read_error_at_the_start_sets_nothing_aside(code, template, tmp_path) -> None:
    """Row 9 of the attack: acknowledged versions were lost, also after a healthy restart."""
    for call in itertools.count(1):
        folder = tmp_path / str(call)
        shutil.copytree(template, folder)
        with failing_call(call, code=code) as faulty:
            history, message = open_history(folder), ""
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    loaded, _ = load_latest(history)
                assert compute_checksum(loaded) == compute_checksum(state(VERSIONS))
            except StorageError as error:
                message = str(error)
        assert ("cannot be read" in message) == (faulty.calls >= call)
        assert not history.has_corrupt_tail
        check_restart(folder, None, exact=True)
        if faulty.calls < call:
            break
        shutil.rmtree(folder)
    assert call > 10


def test_a_damaged_oldest_version_is_one_sentence(template, tmp_path) -> None:
    shutil.copytree(template, tmp_path / "x")
    open_history(tmp_path / "x").prune(2)
    oldest = tmp_path / "x" / "versions" / "000003.safetensors"
    oldest.write_bytes(b"\x08" + oldest.read_bytes()[1:])
    with pytest.raises(CorruptRecordError, match=r"000003\.safetensors.*restore a backup"):
        load_latest(open_history(tmp_path / "x"))


@pytest.mark.parametrize("mode", ["before", "after", "gone"])
def test_a_lock_is_held_or_refused_whatever_fails(mode, tmp_path) -> None:
    for call in itertools.count(1):
        is_held = False
        with (
            failing_call(call, mode) as faulty,
            contextlib.suppress(DosappError),
            lock_folder(tmp_path),
        ):
            is_held = True
        assert is_held == (faulty.calls < call)
        with lock_folder(tmp_path):  # no descriptor is left that holds it
            pass
        if is_held:
            break


def test_a_folder_that_cannot_be_flushed_after_the_rename_is_reported_as_it_is(
    template, tmp_path, caplog
) -> None:
    """Row 13: the job was called failed, and its version was there after a restart."""
    shutil.copytree(template, tmp_path / "x")
    history, flush, flushed = open_history(tmp_path / "x"), files.flush_folder, []

    def fail_second(folder: Path) -> None:
        flushed.append(folder)
        if len(flushed) == 2:  # after the version's own
            raise OSError(errno.EIO, "Input/output error")
        flush(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "flush_folder", fail_second)
        assert append(history) == VERSIONS + 1
    assert "see to the disk" in caplog.text
    check_restart(tmp_path / "x", VERSIONS + 1, exact=True)
    assert append(history) == VERSIONS + 2
