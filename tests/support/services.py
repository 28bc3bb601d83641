"""What tests of the service share: a small learner in a folder, and patience."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dosapp.backbones.clip import CLIPBackbone
from dosapp.experiments.plan import build_scenario
from dosapp.learner.learner import Learner
from dosapp.scenario import Scenario
from dosapp.service.service import LearningService, Service
from dosapp.settings import RunSettings
from support.settings import SMALL


def taught(net: CLIPBackbone, folder: Path, **changes: object) -> Scenario:
    """Three classes of two times three, taught and saved; the stream they come from."""
    settings: RunSettings = RunSettings.parse({**SMALL, **changes})
    learner = Learner(settings.learner(), net.shared_copy(own=list(net.weights())))
    stream = build_scenario(settings, net.preprocess)
    learner.learn(stream.session(0))
    learner.save(folder, "taught for the tests")
    return stream


def until(condition: Callable[[], object]) -> None:
    """Wait for something that must happen; the limit is only for when it does not."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def hold_the_writer(service: LearningService) -> threading.Event:
    """The writer has no time for anything else until the event is set."""
    hold, held = threading.Event(), threading.Event()

    def wait() -> None:
        held.set()
        hold.wait()

    service.writer.ask(wait)
    held.wait()
    return hold


@contextlib.contextmanager
def at_a_port(service: Service) -> Iterator[str]:
    """A service behind a real server in this process: its address."""
    import uvicorn

    from dosapp.service.http.app import build_app

    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()  # whoever comes early waits
        config = uvicorn.Config(build_app(service), log_level="warning", ws="none", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([door],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{door.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()
