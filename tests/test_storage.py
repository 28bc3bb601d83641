"""Whole files or none."""

import errno
import os
from pathlib import Path

import pytest
import torch

from dosapp.errors import BadInput
from dosapp.storage import State, read_record, write_bytes, write_record


def test_a_record_comes_back(tmp_path: Path) -> None:
    state = State({"a/b": torch.arange(6.0).view(2, 3)}, {"n": 1, "names": ["é"]})
    total = write_record(tmp_path / "x.safetensors", state)
    again, same = read_record(tmp_path / "x.safetensors")
    assert same == total
    assert again.facts == state.facts
    assert torch.equal(again.tensors["a/b"], state.tensors["a/b"])


def test_a_full_disk_is_a_sentence_and_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "x.json"
    write_bytes(path, b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadInput, match="is full; free some space"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot write"):
        write_bytes(tmp_path / "file" / "x.json", b"")
