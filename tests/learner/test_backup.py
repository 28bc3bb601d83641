"""Backup, restore and verify, also while a service writes the folder."""

import contextlib
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from dosapp.errors import CorruptRecordError, InputError
from dosapp.history.history import History
from dosapp.history.record import State, compute_checksum
from dosapp.learner.backup import copy_learner
from dosapp.learner.learner import Learner
from dosapp.learner.verify import find_problems
from dosapp.runtime.files import lock_folder
from dosapp.runtime.new_folder import PREFIX, new_folder
from support.cli import dosapp
from support.pins import OLD_LEARNER


@pytest.fixture
def folder(tmp_path) -> Path:
    """A learner of version 0.1, with a private file and a log as a service leaves them."""
    path = Path(shutil.copytree(OLD_LEARNER, tmp_path / "learner"))
    (path / "tokens.json").write_text("{}")
    (path / "tokens.json").chmod(0o600)
    (path / "audit.jsonl").write_text('{"what": "taught"}\n')
    return path


def test_a_backup_is_put_back_as_the_same_learner(folder, tmp_path, loaded_tiny) -> None:
    expected = Learner.load(folder, loaded_tiny).digest()
    printed = dosapp("backup", folder, tmp_path / "copy").stdout
    assert printed.startswith(f"wrote {tmp_path / 'copy'}, at version 2")
    assert printed.endswith(f"dosapp restore {tmp_path / 'copy'} NEW\n")
    assert dosapp("verify", tmp_path / "copy").stdout == f"{tmp_path / 'copy'} is intact\n"
    shutil.rmtree(folder)
    assert "now: dosapp serve" in dosapp("restore", tmp_path / "copy", folder).stdout
    restored = Learner.load(folder, loaded_tiny)
    assert restored.digest() == expected
    assert (folder / "tokens.json").stat().st_mode & 0o777 == 0o600
    assert (folder / "audit.jsonl").read_text() == '{"what": "taught"}\n'
    restored.save(folder)
    assert len(Learner.open_history(folder).versions()) == 3


def test_what_cannot_be_copied_is_one_sentence(folder, tmp_path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    for command in ("backup", "restore"):
        assert "is not empty" in dosapp(command, folder, tmp_path / "full", code=2).stderr
        assert "no learner" in dosapp(command, tmp_path / "full", tmp_path / "y", code=2).stderr
    assert "is inside" in dosapp("backup", folder, folder / "copy", code=2).stderr
    path = folder / "versions" / "000001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptRecordError, match=r"000001\.safetensors' is torn.*dosapp verify"):
        copy_learner(folder, tmp_path / "z")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "learner"]


def test_verify_names_every_problem_in_a_line(folder) -> None:
    assert find_problems(folder) == []
    for name in ("learner.json", "audit.jsonl", "versions/000002.safetensors"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-5])
    (folder / "tokens.json").write_text("{")
    lines = dosapp("verify", folder, code=1).stdout.splitlines()
    for name in ("learner.json", "audit.jsonl", "000002.safetensors", "tokens.json"):
        assert sum(name in line for line in lines) == 1, name
    assert len(lines) == 4
    (folder / "photos").mkdir()
    assert "holds no learner" in dosapp("verify", folder / "photos", code=2).stderr
    assert "is no folder" in dosapp("verify", folder / "nothing", code=2).stderr


def test_verify_finds_numbers_that_are_not_finite(folder) -> None:
    history = History(folder, lambda key: None)
    state, _ = history.resume()
    tensors = {**state.tensors, "student/logit_scale": torch.tensor(float("nan"))}
    history.append(State(tensors, state.facts), State(), "crafted")
    problems = find_problems(folder)
    assert all("not finite numbers" in problem for problem in problems)
    assert len(problems) == 2  # the version and the checkpoint


def test_a_folder_that_is_being_written_is_copied_as_it_was_acknowledged(
    folder, tmp_path, loaded_tiny
) -> None:
    """A writer appends and merges versions all the time; each copy is one of its states."""
    learner = Learner.load(folder, loaded_tiny)
    digests: dict[int, str] = {}
    copies, done = [tmp_path / f"copy{n}" for n in range(4)], threading.Event()

    def write() -> None:
        with lock_folder(folder) as lock:
            history = learner.history(folder)
            history.begin_writing(lock)
            while not done.is_set():
                learner.student.steps += 1
                state = learner.state()
                digests[history.head + 1] = compute_checksum(state)
                history.append(state, learner.working_state(), "written")
                if history.head % 3 == 0:
                    history.prune(2)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        heads = [copy_learner(folder, copy) for copy in copies]
        assert find_problems(folder) == []
    finally:
        done.set()
        writer.join()
    for head, copy in zip(heads, copies, strict=True):
        assert find_problems(copy) == []
        if head > 2:
            assert Learner.load(copy, loaded_tiny).digest() == digests[head]
    assert heads == sorted(heads)


class TestNewFolder:
    def test_it_appears_complete_or_not_at_all(self, tmp_path) -> None:
        target = tmp_path / "deep" / "target"
        with contextlib.suppress(KeyboardInterrupt), new_folder(target) as filled:
            (filled / "half").write_text("x")
            raise KeyboardInterrupt
        assert list((tmp_path / "deep").iterdir()) == []
        with new_folder(target) as filled:
            (filled / "whole").write_text("x")
            assert not target.exists()
        assert [p.name for p in target.iterdir()] == ["whole"]
        with pytest.raises(InputError, match="is not empty"), new_folder(target):
            pass

    def test_what_a_killed_process_left_is_removed(self, tmp_path) -> None:
        """Row 14; what another process still fills stays."""
        script = (
            "import os, signal, sys; from pathlib import Path\n"
            "from dosapp.runtime.new_folder import new_folder\n"
            "with new_folder(Path(sys.argv[1])) as filled:\n"
            "    (filled / 'half').write_text('x')\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        command = [sys.executable, "-c", script, str(tmp_path / "a")]
        assert subprocess.run(command, check=False, timeout=120).returncode == -9
        assert len([p for p in tmp_path.iterdir() if p.name.startswith(PREFIX)]) == 1
        with new_folder(tmp_path / "b"), new_folder(tmp_path / "c"):
            pass
        assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "c"]

    def test_every_file_is_flushed(self, tmp_path, monkeypatch) -> None:
        import os

        flush, flushed = os.fsync, []

        def record(descriptor: int) -> None:
            flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
            flush(descriptor)

        monkeypatch.setattr(os, "fsync", record)
        with new_folder(tmp_path / "x") as filled:
            (filled / "in").mkdir()
            for name in ("a", "in/b"):
                (filled / name).write_text("x")
        assert {"a", "b", "in", "new"} <= set(flushed)
        assert flushed[-1] == tmp_path.name  # the rename
