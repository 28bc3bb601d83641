import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

from dosapp.backbones.clip import CLIPBackbone
from dosapp.backbones.registry import load_backbone
from dosapp.settings import LearnerSettings, RunSettings
from support.settings import CHROMIUM, SMALL

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the hub
os.environ["DOSAPP_CACHE"] = tempfile.mkdtemp(prefix="dosapp-tests-")  # never the user's
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def _loaded() -> CLIPBackbone:
    return load_backbone("tiny")


@pytest.fixture
def tiny(_loaded: CLIPBackbone) -> CLIPBackbone:
    """The embedded backbone, with weights of its own."""
    return _loaded.shared_copy(own=list(_loaded.weights()))


@pytest.fixture
def small():
    def make(**changes: object) -> RunSettings:
        settings: RunSettings = RunSettings.parse({**SMALL, **changes})
        return settings

    return make


@pytest.fixture
def pupil(small):
    def make(**changes: object) -> LearnerSettings:
        return small(**changes).learner()

    return make


@pytest.fixture(scope="module")  # no longer: its event loop would be in the way of others
def browser() -> Iterator[object]:
    """Chromium, driven by Playwright."""
    api = pytest.importorskip("playwright.sync_api")
    api.expect.set_options(timeout=30_000)  # the machine may be busy
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
