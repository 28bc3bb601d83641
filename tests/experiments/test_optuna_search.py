"""Optuna proposes learning rates (test_grid.py checks what is read)."""

import math
import sys

import pytest
import yaml

from dosapp.experiments.optuna_search import propose_rates
from support.cli import dosapp

FLAGS = ["--classes", 8, "--tasks", 2, "--train-images", 5, "--test-images", 4, "--epochs", 1]
FLAGS += ["--batch-size", 4, "--methods", "flyp"]


def test_proposals_move_to_the_best_rates_and_can_be_repeated() -> None:
    def propose() -> list[float]:
        # the accuracy has its peak at 1e-3
        return list(propose_rates(1e-6, 1.0, 40, lambda lr: -abs(-3 - math.log10(lr))))

    rates = propose()
    assert rates == propose()
    assert all(1e-6 <= lr <= 1 for lr in rates)
    near = [1e-4 < lr < 1e-2 for lr in rates]
    assert sum(near[20:]) > sum(near[:20])


def test_the_command_writes_the_rates(tmp_path) -> None:
    search = ["--search", "optuna", "--trials", 4, "--rates", "1e-9,10"]  # the largest fail
    dosapp("tune", *FLAGS, "--tries", 1, *search, cwd=tmp_path)
    values = yaml.safe_load((tmp_path / "rates.yaml").read_text())
    assert len(values["seen"]["flyp"]["accuracy"]) == 4
    assert values["rates"]["flyp"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--trials 3", "--trials is 3, which only --search optuna uses"),
        ("--search optuna --rates 1e-3", "Optuna needs two ends above 0"),
        ("--search optuna --rates 0,1", "Optuna needs two ends above 0"),
        ("--search bayes", "bayes"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_computed(flags, message, tmp_path) -> None:
    done = dosapp("tune", *FLAGS, *flags.split(), cwd=tmp_path, code=2)
    assert message in done.stderr
    assert not (tmp_path / "rates.yaml").exists()


def test_a_missing_optuna_is_one_sentence(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    done = dosapp("tune", *FLAGS, "--search", "optuna", cwd=tmp_path, code=2)
    assert "pip install -e '.[optuna]'" in done.stderr
