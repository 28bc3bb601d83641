"""What many tests share: small settings, and marks for what a machine may lack."""

import shutil
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "shared"
shared_only = pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")

# Small enough for a second, large enough for two sessions with three classes each.
SMALL = {
    "classes": 6,
    "tasks": 2,
    "epochs": 2,
    "batch_size": 8,
    "stream_batch_size": 8,
    "train_images": 8,
    "test_images": 8,
    "lr": 1e-3,
}
