"""A real service in a process of its own, and a small learner for it."""

import io
import secrets
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

from dosapp.data.preprocess import to_bytes
from dosapp.experiments.plan import build_scenario
from dosapp.learner.learner import Learner
from dosapp.scenario import Scenario
from dosapp.service.client import Client
from dosapp.service.tokens import Tokens
from dosapp.settings import RunSettings

SMALL = {
    "data": "shapes", "classes": 20, "tasks": 2, "train_images": 16, "test_images": 40,
    "epochs": 1, "batch_size": 16, "all_class_negatives": True,
}  # fmt: skip

# These drills are about other things than poisoning; `make_small_learner` keeps no canary.
WITHOUT_CANARY = ("--no-require-canary", "--canary-share", "0")


@dataclass
class ServiceProcess:
    """A running `dosapp serve`."""

    url: str
    process: "subprocess.Popen[bytes]"
    token: str  # that may teach

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    def client(self, token: str | None = None) -> Client:
        """A new client of the service, with a token of its own or that of the drill."""
        return Client(self.url, token or self.token)

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """Send SIGTERM and wait; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def start_service(folder: Path, *flags: str) -> Iterator[ServiceProcess]:
    """Run `dosapp serve FOLDER` until the block ends; yields when the service is ready.

    Args:
        folder: Of the learner; the service's output goes to `serve.log` in it.
        *flags: More arguments of `dosapp serve`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = Tokens(folder).add(f"drill {secrets.token_hex(4)}", "teach")
    serve = [sys.executable, "-m", "dosapp", "serve", str(folder), "--port", str(port)]
    command = [*serve, *WITHOUT_CANARY, *flags]
    with (folder / "serve.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    service = ServiceProcess(f"http://127.0.0.1:{port}", process, token)
    try:
        with service.client() as client:
            client.wait(120)
        yield service
    finally:
        if process.poll() is None:
            service.kill()


def make_small_learner(folder: Path) -> Scenario:
    """Train a learner on ten classes and save it; the second task of the scenario has ten more."""
    settings: RunSettings = RunSettings.parse(SMALL)
    learner = Learner(settings.learner())
    scenario = build_scenario(settings, learner.student.backbone.preprocess)
    learner.learn(scenario.session(0))
    learner.save(folder, "trained on ten shapes")
    return scenario


def encode_png(image: Tensor) -> bytes:
    """Encode an image `[3, H, W]`, floats in [0, 1] or bytes, as PNG.

    Example:
        >>> import torch
        >>> encode_png(torch.zeros(3, 8, 8))[:4]
        b'\\x89PNG'
    """
    array = to_bytes(image).permute(1, 2, 0).numpy()
    with io.BytesIO() as buffer:
        Image.fromarray(array).save(buffer, "PNG")
        return buffer.getvalue()


def encode_test_images(scenario: Scenario, task: int = 0) -> list[bytes]:
    """The test images of a task as PNG files, classes alternating."""
    test = scenario.tasks[task].test
    order = np.argsort(test.labels, kind="stable").reshape(test.labels.max() + 1, -1).T.flatten()
    return [encode_png(image) for image in test.read(order)]


def zip_session(scenario: Scenario, task: int, classes: Sequence[int], images: int) -> bytes:
    """A zip file of class folders with the first training images of each class.

    Args:
        scenario: Where the images come from.
        task: Index of the task.
        classes: Class indices in the task.
        images: Images per class.
    """
    source = scenario.tasks[task]
    with io.BytesIO() as buffer:
        with zipfile.ZipFile(buffer, "w") as archive:
            for label in classes:
                for row in np.flatnonzero(source.train.labels == label)[:images]:
                    name = f"{source.classes[label]}/{row}.png"
                    archive.writestr(name, encode_png(source.train.read([int(row)])[0]))
        return buffer.getvalue()
