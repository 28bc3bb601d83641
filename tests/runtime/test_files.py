"""A file is written whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from dosapp.errors import BusyError, CorruptRecordError, StorageError
from dosapp.runtime.files import lock_folder, read_json, write_bytes


def test_a_full_disk_is_a_storage_error_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "x.json"
    write_bytes(path, b"old")

    def raise_full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", raise_full)
    with pytest.raises(StorageError, match="is full; free some space"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_path_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        write_bytes(tmp_path / "file" / "x.json", b"")
    with pytest.raises(StorageError, match="cannot write"), lock_folder(tmp_path / "file"):
        pass


def test_a_folder_has_one_lock(tmp_path: Path) -> None:
    with (
        lock_folder(tmp_path),
        pytest.raises(BusyError, match="being written by another process"),
        lock_folder(tmp_path),
    ):
        pass
    with lock_folder(tmp_path):  # released
        pass


def test_a_broken_json_file_is_a_corrupt_record(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": ')
    with pytest.raises(CorruptRecordError, match="cannot be read as JSON"):
        read_json(tmp_path / "x.json")
