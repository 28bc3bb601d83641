"""Shared by tests of the service: a small learner in a folder, waiting, and a real server."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dosapp.backbones.dual_encoder import DualEncoder
from dosapp.experiments.plan import build_scenario
from dosapp.learner.learner import Learner
from dosapp.scenario import Scenario
from dosapp.service.service import LearningService, Service
from dosapp.settings import RunSettings
from support.settings import SMALL


def save_trained_learner(backbone: DualEncoder, folder: Path, **changes: object) -> Scenario:
    """Train the first three of six classes, save the learner, and return the scenario."""
    settings: RunSettings = RunSettings.parse({**SMALL, **changes})
    learner = Learner(settings.learner(), backbone.shared_copy(unshared=list(backbone.weights())))
    scenario = build_scenario(settings, backbone.preprocess)
    learner.learn(scenario.session(0))
    learner.save(folder, "trained for the tests")
    return scenario


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for something that must happen; the limit is only for when it does not."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def block_writer(service: LearningService) -> threading.Event:
    """Keep the writer busy until the event is set."""
    release, started = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        release.wait()

    service.writer.submit(wait)
    started.wait()
    return release


def free_port() -> str:
    """A port that no program has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@contextlib.contextmanager
def serve_at_port(service: Service) -> Iterator[str]:
    """Put a service behind a real server in this process, and yield its address."""
    import uvicorn

    from dosapp.service.http.app import build_app
    from dosapp.service.http.connections import make_config

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # early requests wait
        server = uvicorn.Server(make_config(build_app(service), service))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()
