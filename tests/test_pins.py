"""What no renaming may move: weights, keys of stored results, a served answer, an old record."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from dosapp.experiments.plan import build_scenario, plan
from dosapp.runtime.machine import describe_machine
from dosapp.settings import RunSettings
from support import pins
from support.settings import shared_only

PINS = json.loads(pins.FILE.read_text())
RESULTS = Path(__file__).parents[1] / "results"
GRIDS = {
    "foundation": "foundation",
    "methods": "tiny",
    "mitigations": "mitigations",
    "probe": "probe",
}
SAME_MACHINE = (describe_machine("cpu"), torch.__version__) == (PINS["machine"], PINS["torch"])


def agrees(found: dict[str, object], pin: dict[str, object]) -> None:
    """Bit for bit where the pins were written; other processors round differently."""
    if SAME_MACHINE:
        assert found["digest"] == pin["digest"]
    assert found["norms"] == pytest.approx(pin["norms"], rel=0.02)


@pytest.mark.parametrize("name", pins.cases())
def test_weights_after_two_sessions_and_their_streams(name, tiny) -> None:
    learner, _ = pins.trained(tiny, **pins.cases()[name])
    agrees(pins.described(learner), PINS["learners"][name])


def stored(folder: str) -> list[Path]:
    return sorted((RESULTS / folder).glob("*/result.json"))


def check_keys(folder: str) -> None:
    paths = stored(folder)
    assert paths
    for path in paths:
        result = json.loads(path.read_text())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            planned = plan(RunSettings.parse(result["settings"]))
        assert planned.key == path.parent.name, f"{path}: {result['label']}"


@pytest.mark.parametrize("folder", sorted(set(GRIDS.values())))
def test_keys_of_stored_results(folder) -> None:
    check_keys(folder)


@shared_only
def test_keys_of_stored_results_on_real_images() -> None:
    check_keys("real-small")


@pytest.mark.parametrize("grid", GRIDS)
def test_a_dry_run_finds_every_stored_result(grid) -> None:
    root = RESULTS.parent
    command = [sys.executable, "-m", "dosapp", "grid", str(root / f"configs/{grid}.yaml")]
    command += ["--dry-run", "--out", str(RESULTS / GRIDS[grid])]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines
    assert [line for line in lines if not line.endswith(", done")] == []


def test_a_dry_run_finds_every_run_of_the_papers_tables() -> None:
    command = [sys.executable, "-m", "dosapp", "reproduce", "all", "--scale", "tiny"]
    command += ["--dry-run", "--out", str(RESULTS / "tiny")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = printed.stdout.splitlines()
    assert len(lines) == 165 + 3  # docs/reproduction.md: 165 runs and the three timed ones
    assert [line for line in lines if not line.endswith("  # done")] == []
    assert "168 runs, 168 done" in printed.stderr


def test_the_learner_of_version_0_1_is_read_back(tiny) -> None:
    history, versions, learner = pins.old_versions()
    assert [version.checksum for version in versions] == PINS["old_versions"]
    agrees(pins.described(learner), PINS["old_learner"])
    assert learner.digest() == PINS["old_learner"]["digest"]  # nothing was computed
    first = history.at(1)
    assert first.facts["classes"] == learner.classes


def test_a_served_answer(tiny) -> None:
    history, _, _ = pins.old_versions()
    scenario = build_scenario(RunSettings.parse(pins.SETTINGS), tiny.preprocess)
    answer = pins.served(history.folder, scenario.tasks[0].test.read([0])[0])
    pin = PINS["served"]
    assert answer["version"] == pin["version"]
    for one, other in zip(answer["predictions"], pin["predictions"], strict=True):
        assert one["label"] == other["label"]
        assert one["known"] == other["known"]
        assert one["score"] == pytest.approx(other["score"], abs=1e-4)
        assert [guess["label"] for guess in one["top"]] == [g["label"] for g in other["top"]]
