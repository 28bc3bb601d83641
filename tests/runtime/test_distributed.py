"""Two processes are one learner: the same decisions, and numbers equal to those of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.distributed_learner import CASES
from support.settings import SMALL

SUPPORT = Path(__file__).parents[1] / "support"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def python(*arguments: object, **options: object) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT.parent)}
    command = [sys.executable, *map(str, arguments)]
    process = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        check=False,
        text=True,
        timeout=400,
        **options,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """States of all cases, by `CASE-RANK-of-PROCESSES`."""
    folder = tmp_path_factory.mktemp("states")
    python(SUPPORT / "distributed_learner.py", folder)
    python(*TORCHRUN, SUPPORT / "distributed_learner.py", folder)
    return {file.stem: load_file(file) for file in folder.iterdir()}


@pytest.mark.slow
def test_rows_are_divided_among_processes(states) -> None:
    """Two processes encode as many images as one alone, about half each."""
    alone = int(states["dosapp-0-of-1"]["encoded"])
    shares = [int(states[f"dosapp-{rank}-of-2"]["encoded"]) for rank in (0, 1)]
    assert sum(shares) == alone
    assert abs(shares[0] - shares[1]) < 0.3 * alone


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_process_has_the_same_bits(name, states) -> None:
    first, second = (states[f"{name}-{rank}-of-2"] for rank in (0, 1))
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]) or key == "encoded", key


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_learn_what_one_learns(name, states) -> None:
    one, two = states[f"{name}-0-of-1"], states[f"{name}-0-of-2"]
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(two[key], tensor, atol=1e-9, rtol=1e-9, msg=key)
        elif key != "encoded":  # masks and labels
            assert torch.equal(two[key], tensor), key


def test_a_run_of_two_processes_is_the_run_of_one(tmp_path) -> None:
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in SMALL.items()]
    run = ["-m", "dosapp", "run", *flags, "--json", "--out"]
    [one] = json.loads(python(*run, "one", cwd=tmp_path))
    [two] = json.loads(python(*TORCHRUN, *run, "two", cwd=tmp_path))
    assert one["key"] == two["key"]
    assert one["R"] == two["R"]
    assert one["metrics"] == pytest.approx(two["metrics"], abs=1e-5)
    assert "2 processes" in two["machine"]
    assert [p.name for p in (tmp_path / "two").iterdir() if p.name == "result.json"]
