"""A run: its result, its folder, and how it continues after a kill."""

import gc
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor
from torch.nn import Parameter

from dosapp.backbones.registry import TINY
from dosapp.errors import BusyError, InputError
from dosapp.experiments.plan import plan
from dosapp.experiments.result import Result
from dosapp.experiments.run import CHECKPOINT_INTERVAL, RunCallback, run
from dosapp.experiments.store import Store, read_results
from dosapp.learner.learner import Learner
from dosapp.runtime.files import lock_folder
from dosapp.settings import RunSettings
from support.killed_run import SETTINGS

KILLED_RUN = Path(__file__).parents[1] / "support" / "killed_run.py"


def test_a_result_is_complete(small, tmp_path) -> None:
    result = run(small(), tmp_path / "x")
    again = Result.read(tmp_path / "x")
    assert again == result
    assert result.evaluated == "teacher"
    assert set(result.matrices) == {"teacher", "student"}
    assert result.matrices["teacher"]["after"] == result.R
    assert result.R[0][1] is None
    assert result.metrics["accuracy"] == pytest.approx(np.mean(result.R[-1]))
    assert result.metrics["forgetting"] == pytest.approx(result.R[0][0] - result.R[1][0])
    assert set(result.metrics) == set(result.definitions)
    assert len(result.per_class) == 6
    assert np.mean(list(result.per_class.values())) == pytest.approx(result.metrics["accuracy"])
    assert result.steps == {"lessons": [6, 6], "stream": [2, 3]}
    assert all(0 <= share <= 100 for share in result.pseudo_labels)
    assert all(d > 0 for d in result.distance["lessons"])
    assert result.libraries["torch"].startswith("2.")
    assert result.hyperparameters["ema.gamma"] == 0.8
    assert result.hyperparameters["selection.sparsity"] == 0.1
    lines = (tmp_path / "x" / "R.csv").read_text().splitlines()
    assert lines[0] == "session,task 1,task 2"
    assert lines[1].endswith(",")
    json.loads((tmp_path / "x" / "result.json").read_text())


def test_without_a_stream_both_matrices_are_equal(small, tmp_path) -> None:
    result = run(small(stream=False), tmp_path / "x")
    assert result.matrices["teacher"]["before"] == result.matrices["teacher"]["after"]
    assert result.label == "DoSAPP without TTL"
    assert result.pseudo_labels == [None, None]


def test_zero_shot_accuracy_is_that_of_the_pretrained_model(small, tmp_path) -> None:
    frozen = run(small(method="zero-shot"), tmp_path / "a")
    trained = run(small(method="flyp"), tmp_path / "b")
    assert frozen.metrics["accuracy"] == frozen.metrics["zero_shot_accuracy"]
    assert trained.metrics["zero_shot_accuracy"] == frozen.metrics["accuracy"]
    assert frozen.metrics["control_kept"] == 0
    assert frozen.metrics["forward_transfer"] == 0


def test_joint_training_has_one_session_and_every_task(small, tmp_path) -> None:
    result = run(small(method="joint"), tmp_path / "x")
    assert np.array(result.R, dtype=float).shape == (1, 2)
    assert result.metrics["forgetting"] is None


def test_a_long_sequence_has_a_boundary(small, tmp_path) -> None:
    result = run(small(data="shapes+signs"), tmp_path / "x")
    assert len(result.R) == 4
    assert result.stream["boundaries"] == [2]


def test_the_saved_learner_is_that_of_the_end_of_the_run(small, tmp_path) -> None:
    result = run(small(), tmp_path / "x")
    learner = Learner.load(tmp_path / "x" / "learner")
    assert learner.digest() == result.weights
    reasons = [v.reason for v in learner.history(tmp_path / "x" / "learner").versions()]
    assert reasons == [
        "session 1: learned",
        "session 1: adapted",
        "session 2: learned",
        "session 2: adapted",
    ]


@pytest.mark.parametrize("kind", ["lines", "list", "groups"])
def test_a_class_order_file(small, tmp_path, kind) -> None:
    classes = list(plan(small()).scenario.classes)[::-1]
    file = tmp_path / "order.yaml"
    groups = [classes[:1], classes[1:]]
    texts = {"lines": "\n".join(classes), "list": json.dumps(classes)}
    file.write_text(texts.get(kind, json.dumps(groups)))
    scenario = plan(small(class_order=file)).scenario
    assert list(scenario.classes) == classes
    sizes = [len(task.classes) for task in scenario.tasks]
    assert sizes == ([1, 5] if kind == "groups" else [3, 3])


def test_no_tensor_accumulates_over_sessions(small, tmp_path) -> None:
    """The first sessions may create some; then each adds the features of its test images only."""

    class CountTensors(RunCallback):
        counts: list[int] = []

        def on_evaluation(self, session: int, accuracies: list[float]) -> None:
            gc.collect()
            self.counts.append(sum(type(o) in (Tensor, Parameter) for o in gc.get_objects()))

    run(small(classes=20, tasks=10), tmp_path / "x", callback=CountTensors())
    assert len(CountTensors.counts) == 10
    assert set(np.diff(CountTensors.counts[4:])) == {1}


def test_the_tool_for_many_classes(tmp_path) -> None:
    tool = Path(__file__).parents[2] / "tools" / "many_classes.py"
    command = [sys.executable, tool, tmp_path, "--classes", "4", "--sessions", "2"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert re.search(r"session +2: +\d+ MB \(peak +\d+ MB\)", printed)
    assert len(list((tmp_path / "images" / "train").iterdir())) == 4
    assert Result.read(tmp_path / "run").R[0][1] is None


class TestFolders:
    def test_an_existing_run_is_not_overwritten(self, small, tmp_path) -> None:
        run(small(method="zero-shot"), tmp_path / "x")
        with pytest.raises(InputError, match="already holds a run; add --resume"):
            run(small(method="zero-shot"), tmp_path / "x")
        with pytest.raises(InputError, match="other settings"):
            run(small(method="zero-shot", seed=1), tmp_path / "x", resume=True)

    def test_a_folder_with_other_files_is_not_changed(self, small, tmp_path) -> None:
        (tmp_path / "letter.txt").write_text("dear")
        with pytest.raises(InputError, match="is not empty and holds no run"):
            run(small(), tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]

    def test_resuming_a_finished_run_only_reads_it(self, small, tmp_path) -> None:
        first = run(small(method="zero-shot"), tmp_path / "x")
        assert run(small(method="zero-shot"), tmp_path / "x", resume=True) == first

    def test_two_processes_never_write_one_folder(self, small, tmp_path) -> None:
        (tmp_path / "x").mkdir()
        with (
            lock_folder(tmp_path / "x"),
            pytest.raises(BusyError, match="being written by another process"),
        ):
            run(small(method="zero-shot"), tmp_path / "x")
        run(small(method="zero-shot"), tmp_path / "x", resume=True)  # the lock is released


class TestStore:
    def test_the_same_run_is_never_computed_twice(self, small, tmp_path) -> None:
        store = Store(tmp_path)
        first = store.get(small(method="zero-shot"))
        written = next(tmp_path.rglob("result.json")).stat().st_mtime_ns
        assert store.get(small(method="zero-shot")) == first
        assert next(tmp_path.rglob("result.json")).stat().st_mtime_ns == written
        assert [r.key for r in read_results([tmp_path])] == [first.key]

    def test_settings_that_determine_a_result_change_its_key(self, small) -> None:
        keys = [
            plan(small(**changes)).key
            for changes in (
                {},
                {"seed": 1},
                {"options": {"sparsity": 0.3}},
                {"imbalanced": True},
                {"method": "flyp"},
                {"method": "joint"},
                {"method": "spu", "adapt": "dosapp"},
                {"buffer_size": 3},
                {"epochs": 3},
            )
        ]
        assert len(set(keys)) == len(keys)

    def test_other_spellings_of_the_same_run_do_not(self, small) -> None:
        key = plan(small()).key
        assert "one class" not in plan(small()).identity
        assert plan(small(classes=3, tasks=3)).identity["one class"] == 2  # it trains since 0.3
        assert plan(small(options={"sparsity": 0.1})).key == key
        assert plan(small(options={"ema.gamma": 0.8})).key == key
        assert plan(small(options={"smoothing.gamma": 0.8})).key == key  # its name in version 0.1
        assert plan(small(backbone=str(TINY))).key == key

    def test_a_folder_without_results_is_an_input_error(self, tmp_path) -> None:
        with pytest.raises(InputError, match=r"no result\.json"):
            read_results([tmp_path])


def run_until(folder: Path, last: int) -> int:
    """Run or continue in another process, which kills itself at its step number `last`."""
    command = [sys.executable, str(KILLED_RUN), str(folder), str(last)]
    return subprocess.run(command, check=False, timeout=300).returncode


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Result:
    return run(RunSettings.parse(SETTINGS), tmp_path_factory.mktemp("uninterrupted") / "x")


def test_killed_at_any_step_it_ends_with_the_same_bytes(uninterrupted, tmp_path) -> None:
    """SIGKILL in both phases of both sessions; each time at most 50 steps are repeated."""
    folder, log = tmp_path / "x", tmp_path / "x.log"
    steps = [
        f"{phase} {t} {n + 1}"
        for t in range(2)
        for phase, key in (("learn", "lessons"), ("stream", "stream"))
        for n in range(uninterrupted.steps[key][t])
    ]
    position = {step: n for n, step in enumerate(steps)}
    kills = (3, 57, 81, 96, 88, 60)  # two in a labelled phase, one on a stream, and again
    for last in kills:
        assert run_until(folder, last) == -9
        assert not (folder / "result.json").exists()
    assert run_until(folder, 10**9) == 0
    logged = log.read_text().splitlines()
    assert set(logged) == set(steps)
    ends = np.cumsum(kills)
    assert {logged[end - 1].rpartition(" ")[0] for end in ends} == {
        "learn 0",
        "stream 0",
        "learn 1",
        "stream 1",
    }
    for end in ends:
        repeated = position[logged[end - 1]] + 1 - position[logged[end]]
        assert 0 <= repeated <= CHECKPOINT_INTERVAL
    result = Result.read(folder)
    assert result.weights == uninterrupted.weights
    assert json.dumps(result.metrics) == json.dumps(uninterrupted.metrics)
    assert result.matrices == uninterrupted.matrices
    assert result.pseudo_labels == uninterrupted.pseudo_labels


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_with_the_same_bytes(uninterrupted, tmp_path) -> None:
    """After a time instead of a number of steps: also while a file is written."""
    folder = tmp_path / "x"
    random.seed(0)
    for _ in range(8):
        process = subprocess.Popen([sys.executable, str(KILLED_RUN), str(folder), str(10**9)])
        deadline = time.monotonic() + 8 + 6 * random.random()
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
        process.wait()
    assert run_until(folder, 10**9) == 0
    result = Result.read(folder)
    assert result.weights == uninterrupted.weights
    assert result.matrices == uninterrupted.matrices


def test_a_run_without_its_checkpoint_starts_again(small, tmp_path) -> None:
    class Interrupt(RunCallback):
        def on_evaluation(self, session: int, accuracies: list[float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(small(), tmp_path / "x", callback=Interrupt())
    (tmp_path / "x" / "learner" / "working.safetensors").unlink()
    with pytest.warns(UserWarning, match="does not exist; the run starts again"):
        again = run(small(), tmp_path / "x", resume=True)
    assert again.weights == run(small(), tmp_path / "y").weights
    damaged = [p.name for p in (tmp_path / "x" / "learner" / "versions").glob("*.damaged")]
    assert damaged == ["000001.safetensors.damaged"]


def test_an_edited_method_of_another_package_is_another_run(small, tmp_path, monkeypatch) -> None:
    import importlib

    from dosapp.methods.registry import METHODS

    source = "from dosapp.methods.flyp import FLYP\nclass Mine(FLYP):\n    summary = '{}'\n"
    monkeypatch.syspath_prepend(tmp_path)
    keys = []
    for version in ("one", "two"):
        (tmp_path / f"mine_{version}.py").write_text(source.format(version))
        module = importlib.import_module(f"mine_{version}")
        monkeypatch.setitem(METHODS, "mine", module.Mine)
        keys.append(plan(small(method="mine")).key)
    assert keys[0] != keys[1]
    assert plan(small(method="mine")).key == keys[1]
