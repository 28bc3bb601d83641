"""From a folder to a port."""

import ipaddress
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from dosapp.errors import BadInput
from dosapp.learner import Learner
from dosapp.plan import open_stream
from dosapp.service.guard import Canary
from dosapp.service.service import Service, opened
from dosapp.service.settings import ServiceSettings
from dosapp.service.tokens import Tokens
from dosapp.settings import LearnerSettings, RunSettings

DEMO = {"data": "shapes", "classes": 20, "tasks": 2, "train_images": 24, "test_images": 20}


def serve(
    folder: Path,
    settings: ServiceSettings,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    follow: bool = False,
    canary: Canary | None = None,
    watch: Callable[[Service], None] = lambda service: None,
) -> None:
    """Until somebody stops it. SIGTERM and Ctrl-C answer what waits and save what was learned."""
    try:
        import uvicorn

        from dosapp.service.app import build
    except ImportError as error:
        raise BadInput(
            f"serving needs more packages ({error}); pip install 'dosapp[serve]'"
        ) from error
    if not is_loopback(host) and not Tokens(folder):
        raise BadInput(
            f"'{folder}' has no tokens, so it is served on this machine only, not on {host}; "
            f"make one with: dosapp token add {folder} NAME --role teach"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # after uvicorn has had its turn
    with opened(folder, settings, follow=follow, canary=canary) as service:
        watch(service)
        try:
            uvicorn.run(
                build(service),
                host=host,
                port=port,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=30,
            )
        except KeyboardInterrupt:
            return


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def demo(folder: Path) -> Canary:
    """A learner of ten shapes, if the folder has none yet, and pictures to watch it with."""
    settings: RunSettings = RunSettings.checked(DEMO)
    fresh = not (folder / "learner.json").exists()
    learner = Learner(LearnerSettings(rivals=True)) if fresh else Learner.opened(folder)
    stream = open_stream(settings, learner.student.net)
    if fresh:
        learner.learn(stream.session(0))
        learner.save(folder, "taught ten shapes for the demo")
    test = stream.tasks[0].test
    pictures = (test.read(range(len(test))) * 255).round().byte()
    return Canary(pictures, [stream.tasks[0].classes[n] for n in test.labels])
