"""From a learner's folder to a port."""

import contextlib
import errno
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from dosapp.data.preprocess import to_bytes
from dosapp.errors import BusyError, InputError
from dosapp.experiments.plan import build_scenario
from dosapp.learner.canary import Canary
from dosapp.learner.learner import Learner
from dosapp.runtime.extras import missing_extra
from dosapp.runtime.plural import plural
from dosapp.service.log_config import configure_logging
from dosapp.service.service import Service, open_service
from dosapp.service.settings import ServiceSettings, check_learner, is_loopback
from dosapp.service.tokens import Tokens
from dosapp.settings import LearnerSettings, RunSettings

SEND_BUFFER = 262_144  # bytes of the kernel for one connection
SWITCH_INTERVAL = 0.001  # seconds; threads that decode must not hold up the one that answers
DEMO = {"data": "shapes", "classes": 20, "tasks": 2, "train_images": 24, "test_images": 20}


def serve(
    folder: Path,
    settings: ServiceSettings,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    follow: bool = False,
    replicas: int | None = None,
    prepare: Callable[[], Canary | None] = lambda: None,
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
        prepare: Called when the port is taken; returns labelled images for the guards, if any.
        on_ready: Called with a message when the service is ready. At the first start it has a
            token, which is never shown again.

    Raises:
        InputError: The folder holds no learner, a folder of the settings does not exist, other
            machines would need no token, or packages are missing.
        BusyError: Another process writes the folder or has the port.
    """
    check_folders(settings)
    if not settings.token and not is_loopback(host):
        raise InputError(
            f"without tokens '{folder}' is served on this machine only, not on {host}; "
            "leave out --no-token"
        )
    try:
        if replicas:
            from dosapp.service.fleet import FleetSettings, deploy
        else:
            import uvicorn

            from dosapp.service.http.app import build_app
            from dosapp.service.http.connections import make_config
    except ImportError as error:
        extras = "serve,ray" if replicas else "serve"
        raise missing_extra("serving", extras, error) from error
    url = page_url(host, port)
    with bind(host, port) as listener:
        canary = prepare()
        check_learner(folder)
        tokens = Tokens(folder) if settings.token else None
        if tokens is not None:
            _ = tokens.known  # raises if the file cannot be used
        if replicas:
            fleet = FleetSettings(folder=folder, replicas=replicas, service=settings)
            listener.close()  # Ray's proxy listens itself
            with deploy(fleet, host, port, canary), contextlib.suppress(KeyboardInterrupt):
                _exit_on_sigterm()  # replaces Ray's handler
                on_ready(f"one writer and {plural(replicas, 'reader')} of {folder}")
                on_ready(describe_access(url, folder, tokens))
                signal.pause()
            return
        _exit_on_sigterm()
        configure_logging(settings)
        sys.setswitchinterval(SWITCH_INTERVAL)
        with open_service(folder, settings, follow=follow, canary=canary) as service:
            on_ready(describe_learner(service, folder))
            on_ready(describe_access(url, folder, tokens, may_add=not follow))
            with contextlib.suppress(KeyboardInterrupt):
                uvicorn.Server(make_config(build_app(service), service)).run([listener])


def bind(host: str, port: int) -> socket.socket:
    """Listen at a port; early connections wait until they are accepted.

    Raises:
        BusyError: Another process has the port.
        InputError: The host is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # Connections inherit it: an unread answer takes megabytes of the kernel otherwise.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        return listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise BusyError(
                f"port {port} of {host} is taken by another program; give another --port"
            ) from error
        raise InputError(f"cannot listen on {host}, port {port} ({error.strerror})") from error


def check_folders(settings: ServiceSettings) -> None:
    """Raise an `InputError` if a folder of the settings does not exist."""
    folder = settings.session_folder
    if folder is not None and not folder.is_dir():
        raise InputError(f"--session-folder is '{folder}', which is no folder; create it first")
    if settings.canary is not None and not settings.canary.exists():
        raise InputError(
            f"--canary is '{settings.canary}', which does not exist; give a folder of class folders"
        )


def page_url(host: str, port: int) -> str:
    """Return the address of the page, for a browser on this machine.

    Example:
        >>> page_url("0.0.0.0", 8000)
        'http://127.0.0.1:8000/'
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def describe_learner(service: Service, folder: Path) -> str:
    """Say what is served, and why it does not adapt to its stream if something stops that.

    Args:
        service: The service.
        folder: Of the learner.
    """
    status = service.status()
    kind = "" if status["writes"] else "a replica of "
    classes = plural(status["classes"], "class")
    lines = [f"{kind}{folder}: version {status['version']}, {classes}"]
    return "\n".join(
        lines + [status[key] for key in ("adaptation_off", "frozen") if status.get(key)]
    )


def describe_access(url: str, folder: Path, tokens: Tokens | None, may_add: bool = True) -> str:
    """Say where the page is and which token it takes; at the first start a token is made.

    Args:
        url: Of the page.
        folder: Of the learner.
        tokens: Of the learner; None for a service without tokens.
        may_add: Whether a token is made if there never was one.
    """
    end = "/docs is the interface; Ctrl-C stops"
    if tokens is None:
        return f"{url} is the page, for every program on this machine: no token is needed\n{end}"
    if may_add and (token := tokens.add_first()) is not None:
        return (
            f"{url}#token={token} is the page\n"
            "This token may teach. It is shown only now; programs take it from DOSAPP_TOKEN.\n"
            f"{end}"
        )
    names = ", ".join(tokens.known)
    command = f"dosapp token add {folder} NAME --role teach"
    if not names:
        return f"{url} answers no request: there is no token; make one with: {command}\n{end}"
    return f"{url} is the page; it needs a token ({names}); another: {command}\n{end}"


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
    return Canary.from_images(images, [task.classes[n] for n in task.test.labels])
