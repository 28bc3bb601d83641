"""Numbers of a run while it goes on."""

import json
import tomllib
from pathlib import Path

import pytest

from dosapp.experiments.run import run
from dosapp.experiments.tracking import TRACKERS, TrackingCallback
from support.cli import FLAGS, dosapp

ROOT = Path(__file__).parents[2]


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

    monkeypatch.setattr("dosapp.experiments.tracking.TRACKERS", {**TRACKERS, "ours": Ours})
    settings = small(method="spu")
    watch = TrackingCallback(tmp_path / "x", settings, ["ours"])
    run(settings, tmp_path / "x", watch=watch)
    watch.close()
    assert seen[0] == "spu"
    assert seen[-1] == "closed"
    assert seen[1][0] == 1
    assert seen[1][1]["loss"] > 0


def test_a_torn_line_is_not_written_on(small, tmp_path) -> None:
    settings, log = small(method="zero-shot"), tmp_path / "x" / "log.jsonl"
    log.parent.mkdir()
    log.write_text('{"step": 7, "loss": 1.0}\n{"step": 8, "lo')
    for _ in range(2):  # a line that cannot be read stays where it is
        watch = TrackingCallback(log.parent, settings)
        watch.begin("zero-shot", 1)
        assert watch.step == 7
        watch.on_evaluation(0, [50.0])
        watch.close()
    assert [line[:10] for line in log.read_text().splitlines()] == [
        '{"step": 7',
        '{"step": 8',
        *['{"step": 7'] * 2,
    ]


def test_tensorboard_if_it_is_there(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    dosapp("run", *FLAGS, "--out", tmp_path / "x", "--track", "tensorboard")
    assert any((tmp_path / "x" / "tensorboard").iterdir())


def measured(place: Path) -> list[float]:
    lines = [json.loads(line) for line in (place / "log.jsonl").read_text().splitlines()]
    return [line["accuracy"] for line in lines if "accuracy" in line]


@pytest.mark.filterwarnings("ignore")  # what a tracker warns of is not ours
def test_wandb_offline_if_it_is_there(tmp_path, monkeypatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    dosapp("run", *FLAGS, "--out", "x", "--track", "wandb", cwd=tmp_path)
    [run] = (tmp_path / "x" / "wandb").glob("offline-run-*")
    [kept] = run.glob("*.wandb")
    summary = kept.read_bytes()
    assert all(f"{value:.10g}"[:10].encode() in summary for value in measured(tmp_path / "x"))


@pytest.mark.filterwarnings("ignore")
def test_mlflow_in_a_file_if_it_is_there(tmp_path, monkeypatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    dosapp("run", *FLAGS, "--out", "x", "--track", "mlflow", cwd=tmp_path)
    [run] = mlflow.search_runs(experiment_names=["dosapp"], output_format="list")
    assert run.info.status == "FINISHED"
    assert run.data.params["method"] == "dosapp"
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "accuracy")
    assert [point.value for point in history] == measured(tmp_path / "x")


def test_every_tracker_has_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert all(extras[name][0].startswith(f"{name}>=") for name in TRACKERS)


@pytest.mark.parametrize(
    ("name", "says"),
    [("wanbd", "did you mean 'wandb'"), ("mlflow", "pip install 'dosapp[mlflow]'")],
)
def test_a_tracker_that_is_not_there_is_a_sentence(name, says, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    done = dosapp("run", *FLAGS, "--out", tmp_path / "x", "--track", name, code=2)
    assert says in done.stderr
