"""A run that notes every step in a file and kills itself, hard, at the one it is told to."""

import os
import signal
import sys
from pathlib import Path

import torch

from dosapp.experiments.run import RunCallback, run
from dosapp.settings import RunSettings

LONG = {
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


class Noting(RunCallback):
    def __init__(self, notes: Path, last: int) -> None:
        self.notes, self.left = notes, last

    def note(self, *words: object) -> None:
        with self.notes.open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_training_step(self, session: int, step: int, of: int, loss: float) -> None:
        self.note("lesson", session, step)

    def on_stream_step(self, session: int, step: int, of: int) -> None:
        self.note("stream", session, step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, last = Path(sys.argv[1]), int(sys.argv[2])
    watch = Noting(folder.with_suffix(".notes"), last)
    run(RunSettings.parse(LONG), folder, resume=True, watch=watch)
