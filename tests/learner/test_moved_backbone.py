"""A learner whose backbone's folder moved is used with --backbone."""

import shutil
from pathlib import Path

import pytest

from dosapp.backbones.registry import TINY
from dosapp.errors import InputError
from dosapp.learner.learner import Learner
from dosapp.service.service import open_service
from dosapp.service.settings import ServiceSettings
from support.cli import dosapp


@pytest.fixture
def moved(learner_settings, tmp_path) -> tuple[Path, Path]:
    """A learner's folder, and where its backbone is now."""
    old, new, folder = (tmp_path / name for name in ("old", "new", "learner"))
    shutil.copytree(TINY, old)
    Learner(learner_settings(backbone=str(old))).save(folder, "new")
    old.rename(new)
    return folder, new


def test_it_is_found_in_its_new_place(moved, tmp_path) -> None:
    folder, place = moved
    with pytest.raises(InputError, match=r"does not exist.*give its place with --backbone"):
        Learner.load(folder)
    learner = Learner.load(folder, str(place))
    learner.save(folder, "moved")  # the description keeps the name it was created with
    printed = dosapp("history", "rollback", folder, 1, "--backbone", place).stdout
    assert printed == "version 3 is a copy of version 1\n"
    dosapp("history", "diff", folder, 0, 2, "--backbone", place)
    dosapp("history", "gc", folder, "--keep", 1, "--backbone", place)
    error = dosapp("export", folder, tmp_path / "x", "--backbone", place, code=2).stderr
    assert "knows no classes yet" in error
    for follow in (False, True):
        settings: ServiceSettings = ServiceSettings.parse({"backbone": str(place), "threads": 1})
        with open_service(folder, settings, follow=follow) as service:
            assert service.version == 3


def test_another_backbone_is_refused(moved, tmp_path) -> None:
    folder, place = moved
    (place / "preprocessor_config.json").write_text('{"size": {"shortest_edge": 40}}')
    with pytest.raises(InputError, match="use the original one"):
        Learner.load(folder, str(place))
