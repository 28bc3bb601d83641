"""Records: tensors and facts in one file."""

import errno
import os
from pathlib import Path

import pytest
import torch

from dosapp.errors import StorageError
from dosapp.history.record import State, read_facts, read_record, write_record


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = State({"a/b": torch.arange(6.0).view(2, 3)}, {"n": 1, "names": ["é"]})
    checksum = write_record(tmp_path / "x.safetensors", state)
    record, same = read_record(tmp_path / "x.safetensors")
    assert same == checksum
    assert record.facts == state.facts
    assert torch.equal(record.tensors["a/b"], state.tensors["a/b"])
    assert read_facts(tmp_path / "x.safetensors") == (state.facts, checksum)


def test_a_private_record_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    for private in (False, True):
        path = tmp_path / f"{private}.safetensors"
        write_record(path, State({"a": torch.zeros(2)}, private=private))
        assert (path.stat().st_mode & 0o077 == 0) == private


def test_a_record_of_another_user_is_not_called_corrupt(tmp_path: Path, monkeypatch) -> None:
    """A run resets its history when a checkpoint is corrupt, but not when it cannot be read."""
    write_record(tmp_path / "x.safetensors", State({}, {}))

    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match="cannot be read by this user"):
        read_record(tmp_path / "x.safetensors")
