"""The container's packages are pinned by version and hash, and can be listed as an SBOM."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "container-requirements.txt"


def locked() -> dict[str, list[str]]:
    """Pinned requirement → its hashes."""
    text = LOCK.read_text().replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line and line[0] != "#"]
    return {line[0]: line[1:] for line in lines}


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_package_has_hashes_and_the_tested_version() -> None:
    tested = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line[:1] != "#":
            name, _, version = line.partition("==")
            tested[normalize(name)] = version
    requirements = locked()
    for pin, hashes in requirements.items():
        name, _, version = pin.partition("==")
        assert hashes, pin
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", text) for text in hashes), pin
        assert tested.get(normalize(name), version) == version
    names = {pin.partition("==")[0] for pin in requirements}
    assert {"torch", "transformers", "fastapi", "uvicorn", "hatchling"} <= names


def test_no_index_is_named() -> None:
    for path in (LOCK, ROOT / "Containerfile", ROOT / "Makefile"):
        assert "://" not in path.read_text(), path
    assert "--require-hashes -r container-requirements.txt" in (ROOT / "Containerfile").read_text()


def test_the_sbom_lists_every_package(tmp_path) -> None:
    pytest.importorskip("cyclonedx_py")
    out = tmp_path / "sbom.json"
    command = [sys.executable, "-m", "cyclonedx_py", "requirements", str(LOCK), "-o", str(out)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    bom = json.loads(out.read_text())
    assert bom["bomFormat"] == "CycloneDX"
    found = {f"{part['name']}=={part['version']}" for part in bom["components"]}
    assert found == set(locked())
