"""Small settings, and marks for what a machine may lack."""

import shutil
from pathlib import Path

import pytest

from dosapp.testing.method_checks import SMALL_RUN

SHARED = Path(__file__).parents[3] / "shared"
shared_only = pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")

SMALL = dict(SMALL_RUN)
