"""Memory of a process."""

import subprocess
import sys

import pytest

from dosapp.runtime.process_memory import peak_memory

RETAIN = """
import resource, sys, threading
from dosapp.runtime.process_memory import retain_freed_memory

if sys.argv[1] == "retain":
    retain_freed_memory()

import torch


def count_new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(20_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def print_fewest():
    print(min(count_new_pages() for _ in range(30)))


print_fewest()
thread = threading.Thread(target=print_fewest)
thread.start()
thread.join()
"""

RESET = """
from dosapp.runtime.process_memory import reset_peak_memory, retain_freed_memory, peak_memory

retain_freed_memory()
import torch

torch.ones(100_000_000)
print(peak_memory())
reset_peak_memory()
print(peak_memory())
"""


def run_program(program: str, *arguments: str) -> list[float]:
    command = [sys.executable, "-c", program, *arguments]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [float(number) for number in printed.split()]


def test_freed_memory_stays_in_the_process() -> None:
    """Otherwise the kernel fills every large block with zeros, again in every step."""
    if sys.platform != "linux" or max(run_program(RETAIN, "default")) < 1000:
        pytest.skip("this machine's memory is retained anyway")
    assert max(run_program(RETAIN, "retain")) < 1000


def test_the_peak_of_a_run_does_not_include_earlier_runs_of_its_process() -> None:
    if not sys.platform.startswith("linux") or peak_memory() is None:
        pytest.skip("this system does not report the memory of a process")
    large, usual = run_program(RESET)
    assert large - usual > 300  # of 381 MB
