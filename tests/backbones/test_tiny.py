"""The embedded backbone: low enough zero-shot, and high enough after training."""

import pytest

from dosapp.experiments.demo import METHODS
from dosapp.experiments.result import Result
from dosapp.experiments.run import run
from dosapp.settings import RunSettings
from support.cli import dosapp

pytestmark = pytest.mark.slow


def test_zero_shot_is_between_40_and_65_and_joint_training_above_85(tmp_path) -> None:
    result = run(RunSettings(method="joint"), tmp_path / "x")
    assert len(result.per_class) == 100
    assert len(result.tasks) == 10
    assert 40 <= result.metrics["zero_shot_accuracy"] <= 65
    assert result.metrics["accuracy"] >= 85


def test_the_demo_shows_that_dosapp_forgets_less_than_fine_tuning(tmp_path) -> None:
    output = dosapp("demo", "--out", "demo", cwd=tmp_path)
    results = [Result.read(file) for file in (tmp_path / "demo").rglob("result.json")]
    by_name = {result.label: result.metrics for result in results}
    assert len(by_name) == len(METHODS)
    assert by_name["DoSAPP"]["forgetting"] < by_name["FLYP"]["forgetting"]
    assert by_name["DoSAPP"]["accuracy"] > by_name["FLYP"]["accuracy"]
    assert by_name["Joint"]["accuracy"] > by_name["DoSAPP"]["accuracy"]
    assert by_name["StreamGDA"]["accuracy"] > by_name["DoSAPP"]["accuracy"] + 5
    for sparse in ("SPU", "SPU + D^u"):  # by margins that noise does not cross
        assert by_name[sparse]["accuracy"] > by_name["FLYP"]["accuracy"] + 2
        assert by_name[sparse]["forgetting"] < by_name["FLYP"]["forgetting"] - 4
    assert all(name in output.stdout for name in by_name)
    page = (tmp_path / "demo" / "report.html").read_text()
    assert page.count("<svg") == 6
    for name in ("accuracy", "forgetting", "stream", "plane", "labels", "costs"):
        for suffix in ("png", "svg", "pdf"):
            assert (tmp_path / "demo" / f"{name}.{suffix}").stat().st_size > 3000
