"""From a learner's folder to a port."""

import contextlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from dosapp.data.preprocess import to_bytes
from dosapp.errors import InputError
from dosapp.experiments.plan import build_scenario
from dosapp.learner.learner import Learner
from dosapp.runtime.extras import missing_extra
from dosapp.service.guards import Canary
from dosapp.service.log_config import configure_logging
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
    on_ready: Callable[[str], None] = lambda message: None,
) -> None:
    """Serve a learner until SIGTERM or Ctrl-C; both answer what waits and save the stream's steps.

    Args:
        folder: Of the learner.
        settings: Of the service.
        host: Where to listen; other machines need tokens.
        port: Where to listen.
        follow: Serve a replica, which only reads.
        replicas: Number of readers on a Ray cluster, beside one writer.
        canary: Labelled images for the guards.
        on_ready: Called with one line when the service is ready.

    Raises:
        InputError: The folder holds no learner, other machines would need no token, or packages
            are missing.
        BusyError: Another process writes the folder.
    """
    check_learner(folder)
    if not is_loopback(host) and not Tokens(folder):
        raise InputError(
            f"'{folder}' has no tokens, so it is served on this machine only, not on {host}; "
            f"make one with: dosapp token add {folder} NAME --role teach"
        )
    try:
        if replicas:
            from dosapp.service.fleet import FleetSettings, deploy

            fleet = FleetSettings(folder=folder, replicas=replicas, service=settings)
            with deploy(fleet, host, port, canary), contextlib.suppress(KeyboardInterrupt):
                _exit_on_sigterm()  # replaces Ray's handler
                on_ready(f"one writer and {replicas} reader(s) of {folder}")
                signal.pause()
            return
        import uvicorn

        from dosapp.service.http.app import build_app
    except ImportError as error:
        extras = "serve,ray" if replicas else "serve"
        raise missing_extra("serving", extras, error) from error
    _exit_on_sigterm()
    configure_logging(settings)
    with open_service(folder, settings, follow=follow, canary=canary) as service:
        kind = "a replica of " if follow else ""
        on_ready(f"{kind}{folder}: version {service.version}, {len(service.classes)} classes")
        try:
            uvicorn.run(
                build_app(service),
                host=host,
                port=port,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=30,
            )
        except KeyboardInterrupt:
            return


def _exit_on_sigterm() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def prepare_demo(folder: Path) -> Canary:
    """Train a learner of ten shapes, if the folder has none, and return images of its canary."""
    settings: RunSettings = RunSettings.parse(DEMO)
    is_new = not (folder / "learner.json").exists()
    learner = Learner(LearnerSettings(all_class_negatives=True)) if is_new else Learner.open(folder)
    scenario = build_scenario(settings, learner.preprocess)
    if is_new:
        learner.learn(scenario.session(0))
        learner.save(folder, "learned ten shapes for the demo")
    task = scenario.tasks[0]
    images = to_bytes(task.test.read(range(len(task.test))))
    return Canary(images, [task.classes[n] for n in task.test.labels])
