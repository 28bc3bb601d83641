"""A real service in a process of its own, and a small learner for it."""

import io
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from dosapp.experiments.plan import build_scenario
from dosapp.learner.learner import Learner
from dosapp.scenario import Scenario
from dosapp.service.client import Client
from dosapp.settings import RunSettings

SMALL = {
    "data": "shapes", "classes": 20, "tasks": 2, "train_images": 16, "test_images": 40,
    "epochs": 1, "batch_size": 16, "all_class_negatives": True,
}  # fmt: skip


@dataclass
class ServiceProcess:
    url: str
    process: "subprocess.Popen[bytes]"

    def client(self) -> Client:
        return Client(self.url)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """Politely; says how it ended."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def start_service(folder: Path, *flags: str) -> Iterator[ServiceProcess]:
    """`dosapp serve FOLDER`, ready; killed at the end if it still runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dosapp", "serve", str(folder), "--port", str(port), *flags]
    with (folder / "serve.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    found = ServiceProcess(f"http://127.0.0.1:{port}", process)
    try:
        with found.client() as client:
            client.wait(120)
        yield found
    finally:
        if process.poll() is None:
            found.kill()


def make_small_learner(folder: Path) -> Scenario:
    """Ten shapes, taught quickly, in the folder; ten more that nobody has taught."""
    settings: RunSettings = RunSettings.parse(SMALL)
    learner = Learner(settings.learner())
    stream = build_scenario(settings, learner.student.backbone.preprocess)
    learner.learn(stream.session(0))
    learner.save(folder, "taught ten shapes")
    return stream


def png(picture: Tensor) -> bytes:
    """Of `[3, H, W]` in [0, 1]."""
    array = (picture * 255).round().byte().permute(1, 2, 0).numpy()
    with io.BytesIO() as buffer:
        Image.fromarray(array).save(buffer, "PNG")
        return buffer.getvalue()


def pictures(stream: Scenario, task: int = 0) -> list[bytes]:
    """The test pictures of a task, its classes in turn."""
    test = stream.tasks[task].test
    order = np.argsort(test.labels, kind="stable").reshape(test.labels.max() + 1, -1).T.flatten()
    return [png(picture) for picture in test.read(order)]


def lesson(stream: Scenario, task: int, classes: Sequence[int], images: int) -> bytes:
    """A zip of class folders with a few training pictures of each."""
    part = stream.tasks[task]
    with io.BytesIO() as buffer:
        with zipfile.ZipFile(buffer, "w") as archive:
            for label in classes:
                for row in np.flatnonzero(part.train.labels == label)[:images]:
                    name = f"{part.classes[label]}/{row}.png"
                    archive.writestr(name, png(part.train.read([int(row)])[0]))
        return buffer.getvalue()
