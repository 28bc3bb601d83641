"""A lock that was deleted or replaced, and links in a learner's folder."""

import os
from pathlib import Path

import pytest
import torch

from dosapp.errors import CorruptRecordError, InputError, StorageError
from dosapp.history.history import History
from dosapp.history.record import State, compute_checksum
from dosapp.learner.learner_folder import LearnerDescription
from dosapp.runtime.files import append_bytes, lock_folder, read_bytes
from dosapp.service.audit import Audit
from dosapp.service.tokens import Tokens


def state(value: float) -> State:
    return State({"student/w": torch.full((3,), value)})


def test_a_second_writer_after_the_lock_was_deleted_loses_nothing(tmp_path) -> None:
    """Row 10: both wrote version 2, and one of them was lost."""
    with lock_folder(tmp_path) as first_lock:
        first = History(tmp_path, lambda key: None)
        first.begin_writing(first_lock)
        first.append(state(1), State(), "first")
        (tmp_path / ".lock").unlink()
        with pytest.raises(StorageError, match=r"\.lock' was deleted or replaced.*restart"):
            first.append(state(2), State(), "without a lock")
        with lock_folder(tmp_path) as second_lock:
            second = History(tmp_path, lambda key: None)
            second.begin_writing(second_lock)
            assert second.append(state(3), State(), "second") == 2
            for write in (lambda: first.append(state(4), State(), "late"), lambda: first.prune(1)):
                with pytest.raises(StorageError, match="deleted or replaced"):
                    write()
    found = History(tmp_path, lambda key: None)
    assert [v.reason for v in found.versions()] == ["first", "second"]
    assert compute_checksum(found.at(2)) == compute_checksum(state(3))


def test_a_head_that_another_process_wrote_is_not_overwritten(tmp_path) -> None:
    """On a file system without locks the head on disk is what tells."""
    first, second = (History(tmp_path, lambda key: None) for _ in range(2))
    first.append(state(1), State(), "first")
    second.append(state(2), State(), "second")
    for write in (
        lambda: first.append(state(3), State(), "late"),
        lambda: first.checkpoint(state(3), State()),
        lambda: first.prune(1),
    ):
        with pytest.raises(StorageError, match="another process, which made version 2; nothing"):
            write()
    assert [v.reason for v in first.versions()] == ["first", "second"]
    assert second.append(state(3), State(), "third") == 3


class TestLinks:
    """Row 11: a folder that comes from elsewhere reads and writes nothing outside it."""

    @pytest.fixture
    def outside(self, tmp_path) -> Path:
        path: Path = tmp_path / "outside.txt"
        path.write_text("precious")
        return path

    def test_the_lock_is_not_followed_and_not_truncated(self, tmp_path, outside) -> None:
        folder = tmp_path / "x"
        folder.mkdir()
        (folder / ".lock").symlink_to(outside)
        with pytest.raises(InputError, match=r"\.lock' is a symbolic link"), lock_folder(folder):
            pass
        (folder / ".lock").unlink()
        (folder / ".lock").write_text("kept")
        with lock_folder(folder):
            assert (folder / ".lock").read_text() == "kept"
        assert outside.read_text() == "precious"

    def test_the_audit_log_is_not_followed(self, tmp_path, outside) -> None:
        (tmp_path / "audit.jsonl").symlink_to(outside)
        with pytest.raises(InputError, match="is a symbolic link"):
            Audit(tmp_path).write("taught", "eve", {})
        with pytest.raises(InputError, match="is a symbolic link"):
            Audit(tmp_path).last()
        assert outside.read_text() == "precious"

    @pytest.mark.parametrize("name", ["versions", "learner.json", "deep/in/it"])
    def test_a_folder_with_any_link_is_refused(self, name, tmp_path, outside) -> None:
        folder = tmp_path / "x"
        (folder / name).parent.mkdir(parents=True)
        (folder / name).symlink_to(tmp_path if name == "versions" else outside)
        with pytest.raises(InputError, match=f"{name}' is a symbolic link"):
            LearnerDescription.read(folder)

    def test_versions_are_not_written_through_a_link(self, tmp_path) -> None:
        folder, elsewhere = tmp_path / "x", tmp_path / "elsewhere"
        history = History(folder, lambda key: None)
        history.append(state(1), State(), "first")
        (folder / "versions").rename(elsewhere)
        (folder / "versions").symlink_to(elsewhere)
        with pytest.raises(StorageError, match="replaced by a symbolic link"):
            history.append(state(1), State(), "first")
        assert len(list(elsewhere.iterdir())) == 1

    def test_tokens_are_not_read_through_a_link(self, tmp_path) -> None:
        token = Tokens(tmp_path).add("alice", "teach")
        (tmp_path / "tokens.json").rename(tmp_path / "elsewhere.json")
        (tmp_path / "tokens.json").symlink_to(tmp_path / "elsewhere.json")
        with pytest.raises(CorruptRecordError, match="is a symbolic link"):
            Tokens(tmp_path).caller(token)

    def test_pipes_are_no_files(self, tmp_path) -> None:
        os.mkfifo(tmp_path / "learner.json")
        with pytest.raises(InputError, match="is not a file"):
            read_bytes(tmp_path / "learner.json")

    def test_a_link_to_the_folder_itself_is_fine(self, tmp_path) -> None:
        (tmp_path / "x").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "x")
        with lock_folder(tmp_path / "link"):
            append_bytes(tmp_path / "link" / "audit.jsonl", b"{}\n")
        assert (tmp_path / "x" / "audit.jsonl").read_bytes() == b"{}\n"
