"""A small trained learner for tests of the service; a file may define another `saved_learner`."""

import shutil
from pathlib import Path

import pytest

from support.services import save_trained_learner


@pytest.fixture(scope="module")
def saved_learner(loaded_tiny, tmp_path_factory):
    """The folder of a learner of three classes, and its scenario."""
    folder = tmp_path_factory.mktemp("trained") / "learner"
    return folder, save_trained_learner(loaded_tiny, folder, test_images=16)


@pytest.fixture
def folder(saved_learner, tmp_path) -> Path:
    """A copy of the learner's folder."""
    return Path(shutil.copytree(saved_learner[0], tmp_path / "learner"))


@pytest.fixture
def scenario(saved_learner):
    """The scenario whose first session the learner has learned."""
    return saved_learner[1]
