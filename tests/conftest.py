import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dosapp.backbones.clip import CLIPBackbone
from dosapp.backbones.registry import load_backbone
from dosapp.experiments.plan import build_scenario
from dosapp.learner.learner import Learner
from dosapp.scenario import Scenario
from dosapp.settings import LearnerSettings, RunSettings
from support.settings import CHROMIUM, SMALL

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may connect to the hub
os.environ["DOSAPP_CACHE"] = tempfile.mkdtemp(prefix="dosapp-tests-")  # never the user's
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def loaded_tiny() -> CLIPBackbone:
    """The embedded backbone, shared by all tests; its weights must not be changed."""
    return load_backbone("tiny")


@pytest.fixture
def tiny(loaded_tiny: CLIPBackbone) -> CLIPBackbone:
    """The embedded backbone, with weights of its own."""
    return loaded_tiny.shared_copy(unshared=list(loaded_tiny.weights()))


@pytest.fixture
def small() -> Callable[..., RunSettings]:
    """Settings of a small run, with changes."""

    def make(**changes: object) -> RunSettings:
        settings: RunSettings = RunSettings.parse({**SMALL, **changes})
        return settings

    return make


@pytest.fixture
def learner_settings(small) -> Callable[..., LearnerSettings]:
    """Settings of the learner of a small run, with changes."""

    def make(**changes: object) -> LearnerSettings:
        return small(**changes).learner()

    return make


@pytest.fixture
def trained(small, tiny) -> tuple[Learner, Scenario]:
    """A learner after the first session, before its stream; and the scenario."""
    settings = small()
    learner = Learner(settings.learner(), tiny)
    scenario = build_scenario(settings, tiny.preprocess)
    learner.learn(scenario.session(0))
    return learner, scenario


@pytest.fixture
def saved(trained, tmp_path) -> tuple[Learner, Path]:
    """A folder with five versions: before training, a session, then three steps on the stream."""
    learner, scenario = trained
    folder = tmp_path / "saved"
    Learner(learner.settings).save(folder, "new")
    learner.save(folder, "trained")
    for first in (0, 3, 6):
        learner.adapt(scenario.session(0).unlabelled.read(range(first, first + 6)))
        learner.save(folder, "adapted")
    return learner, folder


@pytest.fixture(scope="module")  # not longer: its event loop would interfere with other modules
def browser() -> Iterator[object]:
    """Chromium, driven by Playwright."""
    api = pytest.importorskip("playwright.sync_api")
    api.expect.set_options(timeout=30_000)  # the machine may be busy
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
