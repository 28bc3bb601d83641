"""From a folder to a port."""

import contextlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from dosapp.errors import InputError
from dosapp.experiments.plan import build_scenario
from dosapp.learner.learner import Learner
from dosapp.runtime.extras import missing_extra
from dosapp.service.guards import Canary
from dosapp.service.service import open_service
from dosapp.service.settings import ServiceSettings, check_learner, is_loopback
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
    replicas: int | None = None,
    canary: Canary | None = None,
    watch: Callable[[str], None] = lambda words: None,
) -> None:
    """Until somebody stops it. SIGTERM and Ctrl-C answer what waits and save what was learned."""
    check_learner(folder)
    if not is_loopback(host) and not Tokens(folder):
        raise InputError(
            f"'{folder}' has no tokens, so it is served on this machine only, not on {host}; "
            f"make one with: dosapp token add {folder} NAME --role teach"
        )
    try:
        if replicas:
            from dosapp.service.fleet import Fleet, deployed

            fleet = Fleet(folder=folder, replicas=replicas, service=settings)
            with deployed(fleet, host, port, canary), contextlib.suppress(KeyboardInterrupt):
                _end_politely()  # Ray has put a handler of its own there
                watch(f"one writer and {replicas} reader(s) of {folder}")
                signal.pause()
            return
        import uvicorn

        from dosapp.service.http.app import build_app
    except ImportError as error:
        raise missing_extra("serving", "serve,ray" if replicas else "serve", error) from error
    _end_politely()  # after uvicorn has had its turn
    with open_service(folder, settings, follow=follow, canary=canary) as service:
        kind = "a replica of " if follow else ""
        watch(f"{kind}{folder}: version {service.version}, {len(service.classes)} classes")
        try:
            uvicorn.run(
                build_app(service),
                host=host,
                port=port,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=30,
            )
        except KeyboardInterrupt:
            return


def _end_politely() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def demo(folder: Path) -> Canary:
    """A learner of ten shapes, if the folder has none yet, and pictures to watch it with."""
    settings: RunSettings = RunSettings.parse(DEMO)
    fresh = not (folder / "learner.json").exists()
    learner = Learner(LearnerSettings(all_class_negatives=True)) if fresh else Learner.open(folder)
    stream = build_scenario(settings, learner.student.backbone.preprocess)
    if fresh:
        learner.learn(stream.session(0))
        learner.save(folder, "taught ten shapes for the demo")
    test = stream.tasks[0].test
    pictures = (test.read(range(len(test))) * 255).round().byte()
    return Canary(pictures, [stream.tasks[0].classes[n] for n in test.labels])
