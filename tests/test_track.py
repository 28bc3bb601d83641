"""Numbers of a run while it goes on."""

import json

import pytest

from dosapp.run import run
from dosapp.track import TRACKERS, Tracked
from test_cli import FLAGS, dosapp


def test_every_run_leaves_lines(tmp_path) -> None:
    dosapp("run", *FLAGS, "--method", "dosapp", "--out", tmp_path / "x")
    lines = [json.loads(line) for line in (tmp_path / "x" / "log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == sorted(steps)
    assert all(line["loss"] > 0 for line in lines if "loss" in line)
    assert sum("accuracy" in line for line in lines) >= 2
    result = json.loads((tmp_path / "x" / "result.json").read_text())
    assert sum("loss" in line for line in lines) == sum(result["steps"]["lessons"])
    assert sum("stream_step" in line for line in lines) == sum(result["steps"]["stream"])


def test_a_tracker_is_two_functions(small, tmp_path, monkeypatch) -> None:
    seen = []

    class Ours:
        def __init__(self, folder, settings) -> None:
            seen.append(settings.method)

        def log(self, values, step) -> None:
            seen.append((step, dict(values)))

        def close(self) -> None:
            seen.append("closed")

    monkeypatch.setattr("dosapp.track.TRACKERS", {**TRACKERS, "ours": Ours})
    settings = small(method="spu")
    watch = Tracked(tmp_path / "x", settings, ["ours"])
    run(settings, tmp_path / "x", watch=watch)
    watch.close()
    assert seen[0] == "spu"
    assert seen[-1] == "closed"
    assert seen[1][0] == 1
    assert seen[1][1]["loss"] > 0


def test_tensorboard_if_it_is_there(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    dosapp("run", *FLAGS, "--out", tmp_path / "x", "--track", "tensorboard")
    assert any((tmp_path / "x" / "tensorboard").iterdir())


@pytest.mark.parametrize(
    ("name", "says"), [("wanbd", "did you mean 'wandb'"), ("mlflow", "pip install mlflow")]
)
def test_a_tracker_that_is_not_there_is_a_sentence(name, says, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    done = dosapp("run", *FLAGS, "--out", tmp_path / "x", "--track", name, code=2)
    assert says in done.stderr
