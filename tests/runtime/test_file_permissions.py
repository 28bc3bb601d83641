"""Permissions of the files that are written."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dosapp.data.registry import load_dataset
from dosapp.history.record import State, write_record
from dosapp.runtime.files import create_file, write_bytes, write_json
from support.images import PREPROCESS, write_class_folders


@pytest.fixture(params=[0o022, 0o027, 0o077, 0o002], ids=oct)
def umask(request) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def permissions(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_files_follow_the_umask(umask, tmp_path: Path) -> None:
    write_bytes(tmp_path / "x", b"")
    write_json(tmp_path / "x.json", {})
    write_record(tmp_path / "x.safetensors", State({"a": torch.zeros(2)}, {}))
    os.close(create_file(tmp_path / "y"))
    assert {permissions(path) for path in tmp_path.iterdir()} == {0o666 & ~umask}


def test_private_files_belong_to_their_owner_alone(umask, tmp_path: Path) -> None:
    write_bytes(tmp_path / "x", b"", private=True)
    os.close(create_file(tmp_path / "y", private=True))
    assert {permissions(path) for path in tmp_path.iterdir()} == {0o600}


def test_a_new_content_has_todays_permissions(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_bytes(path, b"old")
    path.chmod(0o666)
    write_bytes(path, b"new", private=True)
    assert permissions(path) == 0o600


def test_cached_images_follow_the_umask(umask, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DOSAPP_CACHE", str(tmp_path / "cache"))
    dataset = load_dataset(str(write_class_folders(tmp_path / "data", ["cat"])), PREPROCESS)
    dataset.train.images.check()
    files = [p for p in (tmp_path / "cache").rglob("*") if p.suffix in (".npy", ".json")]
    assert len(files) == 2
    assert {permissions(path) for path in files} == {0o666 & ~umask}
