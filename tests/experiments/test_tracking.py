"""Trackers: log.jsonl, TensorBoard, Weights & Biases and MLflow, all for real and offline."""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dosapp.errors import InputError
from dosapp.experiments.result import Result
from dosapp.experiments.run import run
from dosapp.experiments.tracking import (
    TRACKERS,
    TrackingCallback,
    list_hyperparameters,
    parse_trackers,
)
from dosapp.settings import RunSettings
from support.cli import FLAGS, dosapp
from support.settings import SMALL

ROOT = Path(__file__).parents[2]


def test_every_run_writes_json_lines(tmp_path) -> None:
    dosapp("run", *FLAGS, "--method", "dosapp", "--out", tmp_path / "x")
    lines = [json.loads(line) for line in (tmp_path / "x" / "log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == sorted(steps)
    assert all(line["loss"] > 0 for line in lines if "loss" in line)
    assert sum("accuracy" in line for line in lines) >= 2
    result = json.loads((tmp_path / "x" / "result.json").read_text())
    assert sum("loss" in line for line in lines) == sum(result["steps"]["lessons"])
    assert sum("stream_step" in line for line in lines) == sum(result["steps"]["stream"])


def test_a_tracker_has_two_methods(small, tmp_path, monkeypatch) -> None:
    calls = []

    class ListTracker:
        def __init__(self, folder, settings) -> None:
            calls.append(settings.method)

        def log(self, values, step) -> None:
            calls.append((step, dict(values)))

        def close(self) -> None:
            calls.append("closed")

    monkeypatch.setattr("dosapp.experiments.tracking.TRACKERS", {**TRACKERS, "list": ListTracker})
    settings = small(method="spu")
    callback = TrackingCallback(tmp_path / "x", settings, ["list"])
    run(settings, tmp_path / "x", callback=callback)
    callback.close()
    assert calls[0] == "spu"
    assert calls[-1] == "closed"
    assert calls[1][0] == 1
    assert calls[1][1]["loss"] > 0


def test_a_tracker_that_cannot_be_opened_leaves_no_open_file(small, tmp_path, monkeypatch) -> None:
    def fail(folder, settings) -> None:
        raise RuntimeError("no login")

    monkeypatch.setattr("dosapp.experiments.tracking.TRACKERS", {**TRACKERS, "broken": fail})
    callback = TrackingCallback(tmp_path / "x", small(), ["broken"])
    with pytest.raises(InputError, match=r"the tracker 'broken' cannot be opened \(no login\)"):
        callback.on_begin("x", 1)
    callback.close()
    with pytest.raises(ValueError, match="closed file"):
        callback.trackers[0].log({"loss": 1.0}, 1)


def test_a_line_that_was_cut_off_is_not_appended_to(small, tmp_path) -> None:
    settings, log = small(method="zero-shot"), tmp_path / "x" / "log.jsonl"
    log.parent.mkdir()
    log.write_text('{"step": 7, "loss": 1.0}\n{"step": 8, "lo')
    for _ in range(2):  # a line that cannot be read stays where it is
        callback = TrackingCallback(log.parent, settings)
        callback.on_begin("zero-shot", 1)
        assert callback.step == 7
        callback.on_metrics(0, {"accuracy": 50.0})
        callback.close()
    assert [line[:10] for line in log.read_text().splitlines()] == [
        '{"step": 7',
        '{"step": 8',
        *['{"step": 7'] * 2,
    ]


def logged_values(run_folder: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (run_folder / "log.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


LOGGED = ("accuracy", "forgetting", "task_accuracy/01", "task_accuracy/02", "loss")


def test_the_log_has_the_numbers_of_the_result(tmp_path) -> None:
    dosapp("run", *FLAGS, "--out", tmp_path / "x")
    result = Result.read(tmp_path / "x")
    assert logged_values(tmp_path / "x", "forgetting") == [result.metrics["forgetting"]]
    assert logged_values(tmp_path / "x", "accuracy")[-1] == result.metrics["accuracy"]
    for j, name in enumerate(("task_accuracy/01", "task_accuracy/02")):
        assert logged_values(tmp_path / "x", name) == [row[j] for row in result.R[j:]]
    before = result.matrices[result.evaluated]["before"]
    assert logged_values(tmp_path / "x", "accuracy_before_stream")[0] == before[0][0]


def test_tensorboard_gets_every_metric_and_hyperparameter(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    dosapp("run", *FLAGS, "--out", tmp_path / "x", "--track", "tensorboard")
    events = EventAccumulator(str(tmp_path / "x" / "tensorboard")).Reload()
    for name in LOGGED:
        values = [event.value for event in events.Scalars(name)]
        assert values == pytest.approx(logged_values(tmp_path / "x", name)), name
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    stored = HParamsPluginData.FromString(content).session_start_info.hparams
    assert stored["method"].string_value == "dosapp"
    assert stored["options.ema.gamma"].number_value == 0.8
    assert stored["epochs"].number_value == SMALL["epochs"]
    [final] = events.Scalars("final/accuracy")
    assert final.value == pytest.approx(logged_values(tmp_path / "x", "accuracy")[-1])


def read_wandb_records(file: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store, records = DataStore(), []
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        records.append(Record.FromString(data))
    store.close()
    return records


def test_wandb_offline_gets_every_metric_and_hyperparameter(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    dosapp("run", *FLAGS, "--out", "x", "--track", "wandb", cwd=tmp_path)
    [run] = (tmp_path / "x" / "wandb").glob("offline-run-*")
    [file] = run.glob("*.wandb")
    records = read_wandb_records(file)
    [config] = [r.run.config.update for r in records if r.HasField("run")]
    values = {item.key: json.loads(item.value_json) for item in config}
    assert (values["method"], values["options.ema.gamma"]) == ("dosapp", 0.8)
    items = [item for r in records if r.HasField("history") for item in r.history.item]
    for name in LOGGED:
        found = [i for i in items if name in (i.key, *i.nested_key)]
        numbers = [json.loads(item.value_json) for item in found]
        assert numbers == pytest.approx(logged_values(tmp_path / "x", name)), name


def test_mlflow_in_a_folder_gets_every_metric_and_hyperparameter(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more packages
    dosapp("run", *FLAGS, "--out", "x", "--track", "mlflow", cwd=tmp_path)
    [run] = mlflow.search_runs(experiment_names=["dosapp"], output_format="list")
    assert run.info.status == "FINISHED"
    assert run.data.params["method"] == "dosapp"
    assert run.data.params["options.ema.gamma"] == "0.8"
    for name in LOGGED:
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, name)
        assert [point.value for point in history] == logged_values(tmp_path / "x", name), name


def test_hyperparameters_of_a_stage_are_listed() -> None:
    settings = RunSettings(method="spu", merging="magmax", options={"scaling_coef": 0.4})
    listed = list_hyperparameters(settings)
    assert [v for name, v in listed.items() if name.endswith("scaling_coef")] == [0.4]


def test_a_tracker_that_cannot_be_opened_is_one_sentence(tmp_path, monkeypatch) -> None:
    """Such as W&B without a login; the run can be repeated without it."""

    def open_tracker(folder: Path, settings: object) -> None:
        raise RuntimeError("No API key configured.\nA second line")

    monkeypatch.setitem(TRACKERS, "wandb", open_tracker)
    command = ["run", *FLAGS, "--out", tmp_path / "x"]
    error = dosapp(*command, "--report-to", "wandb", code=2).stderr
    assert error.startswith("dosapp: the tracker 'wandb' cannot be opened (No API key configured.)")
    assert error.count("\n") == 1
    assert "wrote" in dosapp(*command, "--resume").stdout


def test_every_tracker_has_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert all(extras[name][0].startswith(f"{name}>=") for name in TRACKERS)


@pytest.mark.parametrize(
    ("name", "message"),
    [("wanbd", "did you mean 'wandb'"), ("mlflow", "pip install -e '.[mlflow]'")],
)
def test_an_unknown_or_missing_tracker_is_one_sentence(
    name, message, tmp_path, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setattr("dosapp.experiments.plan.plan", lambda _: pytest.fail("computes"))
    done = dosapp("run", *FLAGS, "--out", tmp_path / "x", "--report-to", name, code=2)
    assert message in done.stderr
    assert not (tmp_path / "x").exists()


def test_trackers_are_named_as_in_open_clip_and_transformers(monkeypatch) -> None:
    assert parse_trackers(["tensorboard,wandb", "wandb"]) == ["tensorboard", "wandb"]
    assert parse_trackers(["none"]) == []
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert parse_trackers(["all"]) == ["tensorboard", "wandb"]
    with pytest.raises(InputError, match="did you mean 'all'"):
        parse_trackers(["al"])
