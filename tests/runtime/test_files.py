"""Whole files or none."""

import errno
import os
from pathlib import Path

import pytest
import torch

from dosapp.errors import InputError
from dosapp.history.delta import compute_delta
from dosapp.history.record import State, read_record, write_record
from dosapp.runtime.files import write_bytes


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
    with pytest.raises(InputError, match="is full; free some space"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        write_bytes(tmp_path / "file" / "x.json", b"")


def test_changes_are_stored_under_the_names_that_are_promised() -> None:
    old = {f"{role}/w": torch.zeros(8, 9) for role in ("student", "teacher")}
    old |= {"student/same": torch.ones(3), "method/é": torch.ones(3), "method/x": torch.ones(2)}
    new = {
        key: tensor.clone() for key, tensor in old.items() if "/é" not in key and "/x" not in key
    }
    new["student/w"][0, 0], new["teacher/w"][7, 8] = 1.0, 2.0
    new |= {"mask/w": torch.ones(8, 9, dtype=torch.bool), "method/count": torch.tensor([3])}
    found = compute_delta(new, old)
    assert set(found) == {
        "bits/w", "values/student/w", "shape/student/w", "values/teacher/w", "shape/teacher/w",
        "packed/mask/w", "shape/mask/w", "dense/method/count", "gone/"}  # fmt: skip
    assert found["values/student/w"].tolist() == [1, 0]
    assert found["values/teacher/w"].tolist() == [0, 2]
    assert found["shape/mask/w"].tolist() == [8, 9]
    assert bytes(found["gone/"].tolist()).decode().split("\n") == ["method/x", "method/é"]
