"""The progress bar of `learn` and `adapt_stream`: on a terminal only, unless it is asked for."""

import os
import pty
import subprocess
import sys

import pytest
import torch

from dosapp import Learner, LearnerSettings
from dosapp.backbones.registry import TINY

IMAGES = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
TRAINING = f"""
import torch
from dosapp import Learner, LearnerSettings
learner = Learner(LearnerSettings(backbone={str(TINY)!r}, epochs=1))
images = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
learner.learn({{"fox": images, "owl": images}})
learner.adapt_stream(images.repeat(4, 1, 1, 1))
"""


def read_terminal(**environment: str) -> str:
    """What a program that trains writes to a terminal."""
    terminal, program_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", TRAINING],
        stderr=program_end,
        # Commands that tests ran in this process have set the variable.
        env={
            **os.environ,
            "DOSAPP_NO_PROGRESS": "",
            "TERM": "xterm",
            "COLUMNS": "120",
            **environment,
        },
    )
    os.close(program_end)
    written = b""
    try:
        while part := os.read(terminal, 4096):
            written += part
    except OSError:  # the program has ended
        pass
    os.close(terminal)
    assert process.wait() == 0, written.decode()
    return written.decode()


def test_a_terminal_gets_a_bar_and_can_switch_it_off() -> None:
    written = read_terminal()
    assert "choosing the learning rate: trying" in written
    assert "1/1" in written  # eight images are one step
    assert "2/2" in written  # sixteen streamed ones two
    assert "loss" in written
    assert read_terminal(DOSAPP_NO_PROGRESS="1") == ""


@pytest.mark.parametrize("progress", [None, True])
def test_elsewhere_it_is_silent_unless_asked_for(progress, tiny, capsys) -> None:
    learner = Learner(LearnerSettings(epochs=1, batch_size=4), tiny)
    learner.learn({"fox": IMAGES, "owl": IMAGES}, progress=progress)
    learner.adapt_stream(IMAGES, progress=progress)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert ("2/2" in printed.err) is bool(progress)
    assert bool(printed.err) is bool(progress)
