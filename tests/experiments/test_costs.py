"""What a planned run would cost."""

import json

import pytest
import yaml

from dosapp.errors import InputError
from dosapp.experiments.costs import GPUS, StepCost, estimate, gpu_seconds, gpus, step_costs
from dosapp.experiments.plan import plan
from support.cli import FLAGS, dosapp


def test_a_run_is_lessons_stream_and_examinations(small) -> None:
    """Two sessions of three classes: 24 lessons in batches of 8, two epochs; a stream of the half
    of the test pictures of all classes seen; both experts asked before it and after."""
    settings = small()
    (lessons, stream, exam), held = step_costs(plan(settings), counted=True)
    assert lessons.steps == 2 * 2 * 3
    assert stream.steps == 2 + 3  # 12 and 24 pictures
    assert exam.steps * 12 == 2 * 2 * (12 + 24)  # pictures of the first task at a time
    assert all(part.seconds > 0 and part.operations > 0 for part in (lessons, stream, exam))
    assert lessons.kept > 0
    assert exam.kept == 0
    weights = sum(w.numel() * 4 for w in plan(settings).net.weights().values())
    assert weights < held < 2 * weights


def test_operations_of_a_step_are_counted(small) -> None:
    """A stream step is two forwards and a backward; it cannot be less than the image towers'."""
    (_, stream, exam), _ = step_costs(plan(small()), counted=True)
    image = exam.operations / 12  # texts are cached
    assert stream.operations > 3 * 8 * image


def test_a_short_session_is_looked_at_as_often_as_a_long_one(small) -> None:
    (lessons, _, _), _ = step_costs(plan(small(batch_size=24)))
    assert lessons.steps == 4
    assert lessons.seconds > 1e-3  # not the end of an iterator


def test_a_gpu_is_arithmetic_or_traffic() -> None:
    peaks = gpus()["T4"]
    busy, full = StepCost(1, 0, operations=1e15), StepCost(1, 0, kept=1e12)
    assert gpu_seconds("T4", busy, 0, "float32") == pytest.approx(
        1e15 / (0.4 * peaks["float32"] * 1e12)
    )
    assert gpu_seconds("T4", busy, 0, "float16") == pytest.approx(
        1e15 / (0.4 * peaks["half"] * 1e12)
    )
    assert gpu_seconds("T4", full, 5, "float32") == pytest.approx(
        2e12 / (0.7 * peaks["bandwidth"] * 1e9)
    )


def test_the_file_of_gpus_is_whole() -> None:
    for name, peaks in yaml.safe_load(GPUS.read_text()).items():
        assert set(peaks) == {"float32", "half", "bandwidth", "memory"}, name
        assert 0 < peaks["float32"] < peaks["half"]


def test_faster_gpus_are_faster(small) -> None:
    slow, fast = (estimate([small()], gpu) for gpu in ("T4", "H100"))
    assert slow.seconds > fast.seconds > 0
    assert slow.memory == pytest.approx(fast.replay_buffer)


def test_the_command_says_what_it_assumes(tmp_path) -> None:
    said = dosapp("estimate", *FLAGS, "--gpu", "A100-40GB", cwd=tmp_path).stdout
    assert "40% of 19.5 TFLOP/s" in said
    assert "Not measured" in said
    here = json.loads(dosapp("estimate", *FLAGS, "--json", cwd=tmp_path).stdout)
    assert here["runs"] == 1
    assert here["assumed"] is None
    (tmp_path / "grid.yaml").write_text("seeds: 0-1\nclasses: 4\ntasks: 2\ntrain_images: 4\n")
    many = json.loads(dosapp("estimate", tmp_path / "grid.yaml", "--json").stdout)
    assert many["runs"] == 2
    assert "flags cannot" in dosapp("estimate", tmp_path / "grid.yaml", *FLAGS, code=2).stderr


def test_an_unknown_gpu_is_one_sentence(small) -> None:
    with pytest.raises(InputError, match="did you mean 'A10'"):
        estimate([small()], "A1O")
