"""A run that logs every step to a file and sends itself SIGKILL at a given step."""

import os
import signal
import sys
from pathlib import Path

import torch

from dosapp.experiments.run import RunCallback, run
from dosapp.settings import RunSettings

SETTINGS = {
    "classes": 6,
    "tasks": 2,
    "epochs": 8,
    "batch_size": 4,
    "stream_batch_size": 2,
    "train_images": 20,
    "test_images": 60,
    "lr": 1e-3,
    "buffer_size": 9,
}


class LogSteps(RunCallback):
    def __init__(self, log: Path, last: int) -> None:
        self.log, self.left = log, last

    def write(self, phase: str, session: int, step: int) -> None:
        with self.log.open("a") as file:
            file.write(f"{phase} {session} {step}\n")
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_training_step(self, session: int, step: int, total: int, loss: float) -> None:
        self.write("learn", session, step)

    def on_stream_step(self, session: int, step: int, total: int) -> None:
        self.write("stream", session, step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, last = Path(sys.argv[1]), int(sys.argv[2])
    callback = LogSteps(folder.with_suffix(".log"), last)
    run(RunSettings.parse(SETTINGS), folder, resume=True, callback=callback)
