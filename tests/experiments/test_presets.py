"""Presets: readings of the paper as settings, in commands and grids."""

import pytest
import yaml

from dosapp.errors import InputError
from dosapp.experiments.grid import read_grid
from dosapp.experiments.plan import load_settings
from dosapp.experiments.presets import FILE
from dosapp.settings import RunSettings
from support.cli import dosapp


def test_the_text_of_the_paper_is_the_default() -> None:
    for method in ("spu", "dosapp", "flyp"):
        text = load_settings(None, {"method": method}, "paper-text")
        assert text == RunSettings(method=method)


@pytest.mark.parametrize("name", yaml.safe_load(FILE.read_text()))
def test_every_preset_is_made_of_settings(name) -> None:
    for method in ("spu", "dosapp", "flyp"):
        load_settings(None, {"method": method}, name)


def test_what_is_given_wins_over_the_preset() -> None:
    flags = {"method": "dosapp", "first_stream": True, "options": {"gamma": 0.7}}
    settings = load_settings(None, flags, "paper-likely")
    assert settings.first_stream
    assert settings.options == {"interval": "epoch", "gamma": 0.7}


def test_a_flag_wins_over_the_preset_of_the_file(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("{preset: paper-likely, method: dosapp}")
    assert not load_settings(file, {}).first_stream
    assert load_settings(file, {}, "paper-text").first_stream


def test_a_preset_of_a_grid_depends_on_the_method(tmp_path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text("{preset: [paper-text, paper-likely], method: [spu, dosapp], tasks: 5}")
    runs = {(s.method, s.first_stream): s.options for s in read_grid(file)}
    assert runs == {
        ("spu", True): {},
        ("dosapp", True): {},
        ("spu", False): {"extra_weights": "biases and projection"},
        ("dosapp", False): {"interval": "epoch"},
    }


def test_an_unknown_preset_suggests_the_nearest(tmp_path) -> None:
    with pytest.raises(InputError, match="did you mean 'paper-likely'"):
        load_settings(None, {}, "paper-likly")
    printed = dosapp("run", "--preset", "paper", "--out", tmp_path / "x", code=2)
    assert "unknown preset 'paper'" in printed.stderr
    assert not (tmp_path / "x").exists()
