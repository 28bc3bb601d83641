"""Estimated costs of a run."""

import json

import pytest
import yaml

from dosapp.errors import InputError
from dosapp.experiments.costs import (
    GPUS,
    StepCost,
    estimate,
    estimate_gpu_seconds,
    load_gpus,
    measure_step_costs,
)
from dosapp.experiments.plan import plan
from support.cli import FLAGS, dosapp


def test_a_run_has_labelled_stream_and_evaluation_steps(small) -> None:
    """Two sessions of three classes: 24 labelled images in batches of 8, two epochs; a stream of
    half of the test images of all classes seen; both experts evaluated before and after it."""
    settings = small()
    (labelled, stream, evaluation), held = measure_step_costs(plan(settings), count_operations=True)
    assert labelled.steps == 2 * 2 * 3
    assert stream.steps == 2 + 3  # 12 and 24 images
    assert evaluation.steps * 12 == 2 * 2 * (12 + 24)  # test images of the first task at a time
    assert all(part.seconds > 0 and part.operations > 0 for part in (labelled, stream, evaluation))
    assert labelled.activations > 0
    assert evaluation.activations == 0
    weights = sum(w.numel() * 4 for w in plan(settings).backbone.weights().values())
    assert weights < held < 2 * weights


def test_operations_of_a_step_are_counted(small) -> None:
    """A stream step is two forwards and a backward; it cannot be less than the image towers'."""
    (_, stream, evaluation), _ = measure_step_costs(plan(small()), count_operations=True)
    image = evaluation.operations / 12  # texts are cached
    assert stream.operations > 3 * 8 * image


def test_a_short_session_is_measured_with_as_many_steps(small) -> None:
    (labelled, _, _), _ = measure_step_costs(plan(small(batch_size=24)))
    assert labelled.steps == 4
    assert labelled.seconds > 1e-3  # not the end of an iterator


def test_a_gpu_is_arithmetic_or_traffic() -> None:
    peaks = load_gpus()["T4"]
    busy, full = StepCost(1, 0, operations=1e15), StepCost(1, 0, activations=1e12)
    assert estimate_gpu_seconds("T4", busy, 0, "float32") == pytest.approx(
        1e15 / (0.4 * peaks["float32"] * 1e12)
    )
    assert estimate_gpu_seconds("T4", busy, 0, "float16") == pytest.approx(
        1e15 / (0.4 * peaks["half"] * 1e12)
    )
    assert estimate_gpu_seconds("T4", full, 5, "float32") == pytest.approx(
        2e12 / (0.7 * peaks["bandwidth"] * 1e9)
    )


def test_the_file_of_gpus_is_complete() -> None:
    for name, peaks in yaml.safe_load(GPUS.read_text()).items():
        assert set(peaks) == {"float32", "half", "bandwidth", "memory"}, name
        assert 0 < peaks["float32"] < peaks["half"]


def test_faster_gpus_are_faster(small) -> None:
    slow, fast = (estimate([small()], gpu) for gpu in ("T4", "H100"))
    assert slow.seconds > fast.seconds > 0
    assert slow.memory == pytest.approx(fast.memory)


def test_the_command_prints_its_assumptions(tmp_path) -> None:
    text = dosapp("estimate", *FLAGS, "--gpu", "A100-40GB", cwd=tmp_path).stdout
    assert "40% of 19.5 TFLOP/s" in text
    assert "Not measured" in text
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
