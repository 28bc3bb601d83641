"""One writer and many readers on a Ray cluster, behind one port: the same app, the same folder.

    request ─ Ray's proxy ─ ReaderActor (one of N) ─ answer
                               └─ changes, and images that were answered ─ WriterActor (one)

All nodes must see the folder. Readers follow it as any replica does, and its lock admits one writer
only. Ray restarts actors that die.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope
from torch import Tensor

from dosapp.errors import DosappError, InputError
from dosapp.experiments.ray_cluster import ray_cluster
from dosapp.learner.canary import Canary
from dosapp.learner.learner import Prediction
from dosapp.runtime.files import lock_folder
from dosapp.service.http.app import build_app, error_response
from dosapp.service.http.limits import Limits
from dosapp.service.http.requests import choose_request_id
from dosapp.service.log_config import configure_logging
from dosapp.service.service import Replica, Service, open_service, run_service
from dosapp.service.settings import ServiceSettings, check_learner
from dosapp.settings import Settings

OPEN_TIMEOUT = 30.0  # seconds to wait for the folder
SHUTDOWN_TIMEOUT = 50.0  # seconds an actor has to answer and save; `serve.delete` waits for sixty
READER_PATHS = ("/", "/app.css", "/app.js", "/predict", "/classes", "/versions", "/health",
                "/ready", "/docs", "/openapi.json")  # fmt: skip
SCOPE_FIELDS = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string",
                "root_path", "headers", "client", "server")  # fmt: skip
RawResponse = tuple[int, list[tuple[bytes, bytes]], bytes]  # status, headers, body
Offer = Callable[[Tensor, Sequence[Prediction], str], None]

logger = logging.getLogger("dosapp.service.reader")


class FleetSettings(Settings):
    """Arguments of `serve run dosapp.service.fleet:application`, as `name=value` or in YAML."""

    folder: Path = Field(description="a learner's folder that every node can see")
    replicas: int = Field(2, ge=1, description="readers")
    service: ServiceSettings = ServiceSettings()


class ForwardingReplica(Replica):
    """A replica that forwards the images it has answered to the writer's stream."""

    def __init__(self, folder: Path, settings: ServiceSettings, forward: Offer) -> None:
        super().__init__(folder, settings)
        self._forward = forward

    def offer(self, pixels: Tensor, predictions: Sequence[Prediction], caller: str = "") -> None:
        """Forward images that were answered."""
        if self.settings.adapt:
            self._forward(pixels, predictions, caller)


class ServiceActor:
    """A service and its app inside a Ray actor."""

    def __init__(
        self,
        settings: ServiceSettings,
        open_context: Callable[[], contextlib.AbstractContextManager[Service]],
    ) -> None:
        configure_logging(settings)
        self._stack = contextlib.ExitStack()
        deadline = time.monotonic() + OPEN_TIMEOUT
        while True:  # the last writer may still be saving, or repairing a file
            try:
                self.service = self._stack.enter_context(open_context())
                break
            except (DosappError, OSError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        self.app = build_app(self.service)

    def check_health(self) -> None:
        """Called by Ray, which replaces the actor after an error."""
        if not self.service.is_ready:
            raise RuntimeError("the reader or the writer has ended")

    def __del__(self) -> None:  # Ray's way to end an actor
        if hasattr(self, "_stack"):
            self._stack.close()


class WriterActor(ServiceActor):
    """The one service that writes."""

    def __init__(self, folder: Path, settings: ServiceSettings, canary: Canary | None) -> None:
        super().__init__(settings, lambda: open_service(folder, settings, canary=canary))

    async def answer(self, scope: Scope, body: bytes) -> RawResponse:
        """Answer a request that a reader has forwarded."""
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return messages.pop() if messages else {"type": "http.disconnect"}

        return await call_app(self.app, scope, receive)

    async def offer(self, pixels: Any, predictions: list[Prediction], caller: str) -> None:
        """Add images that a reader has answered to the stream."""
        self.service.answered += len(pixels)
        self.service.offer(torch.from_numpy(pixels), predictions, caller)


class ReaderActor(ServiceActor):
    """A replica that answers what it can, and forwards the rest to the writer."""

    def __init__(self, folder: Path, settings: ServiceSettings, writer: Any) -> None:
        self._writer = writer
        self._limits = Limits(settings)
        self._loop: asyncio.AbstractEventLoop  # of the requests
        self._offers: set[asyncio.Task[None]] = set()
        offer = self._offer_from_thread
        super().__init__(settings, lambda: run_service(ForwardingReplica(folder, settings, offer)))

    async def __call__(self, request: Request) -> Response:
        """Answer a request of Ray's proxy."""
        self._loop, path = asyncio.get_running_loop(), request.scope["path"]
        if path in READER_PATHS or path.startswith(("/versions/", "/docs/", "/samples/")):
            return to_response(await call_app(self.app, request.scope, request.receive))
        return await self._forward(request)

    async def _forward(self, request: Request) -> Response:
        request_id, body = choose_request_id(request.headers), b""
        async for part in request.stream():
            body += part
            if len(body) > self.service.settings.max_body:
                response = error_response(self._limits.body_error(), request_id)
                response.headers["X-Request-Id"] = request_id
                return response
        scope = {name: request.scope.get(name) for name in SCOPE_FIELDS}
        scope["headers"] = [
            *(h for h in request.scope["headers"] if h[0] != b"x-request-id"),
            (b"x-request-id", request_id.encode()),
        ]
        headers = {"X-Request-Id": request_id}
        try:
            return to_response(await self._writer.answer.remote(scope, body))
        except BackPressureError:
            code, headers["Retry-After"] = 429, "1"
            message = "too many requests wait for the writer, or it is restarting; try again later"
        except RayError:
            code, message = 503, "the writer has died and is being restarted; try again later"
        logger.warning("request %s was not answered by the writer: %d", request_id, code)
        return JSONResponse({"error": message, "request_id": request_id}, code, headers)

    def _offer_from_thread(
        self, pixels: Tensor, predictions: Sequence[Prediction], caller: str
    ) -> None:
        """Called by the reader's thread."""
        self._loop.call_soon_threadsafe(self._start_offer, pixels, predictions, caller)

    def _start_offer(self, pixels: Tensor, predictions: Sequence[Prediction], caller: str) -> None:
        task = self._loop.create_task(self._send_offer(pixels, predictions, caller))
        self._offers.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._offers.discard)

    async def _send_offer(
        self, pixels: Tensor, predictions: Sequence[Prediction], caller: str
    ) -> None:
        try:
            await self._writer.offer.remote(pixels.numpy(), list(predictions), caller)
        except Exception as error:  # the writer restarts; the answer itself is not affected
            logger.warning("%d images did not reach the stream: %s", len(pixels), error)


async def call_app(app: ASGIApp, scope: Scope, receive: Receive) -> RawResponse:
    """Call an ASGI app and collect its answer."""
    status, headers, body = 500, [], b""

    async def send(message: Message) -> None:
        nonlocal status, headers, body
        if message["type"] == "http.response.start":
            status, headers = message["status"], [tuple(h) for h in message["headers"]]
        else:
            body += message.get("body", b"")

    await app(scope, receive, send)
    return status, headers, body


def to_response(raw: RawResponse) -> Response:
    """Build the answer for Ray's proxy."""
    status, headers, body = raw
    response = Response(body, status)
    response.raw_headers = headers
    return response


def application(fleet: FleetSettings) -> Any:
    """Build the application for `serve run` and Serve's config files."""
    return build_deployment(fleet, None)


def build_deployment(fleet: FleetSettings, canary: Canary | None) -> Any:
    """Bind one writer and the readers to a folder."""
    folder, settings = fleet.folder.resolve(), fleet.service
    folders = {n: p.resolve() for n in ("canary", "session_folder") if (p := getattr(settings, n))}
    settings = settings.model_copy(update=folders)  # actors have another working directory
    options = {
        "max_ongoing_requests": settings.max_requests,
        "graceful_shutdown_timeout_s": SHUTDOWN_TIMEOUT,
    }
    # Requests for a writer that restarts must not take all of the readers' slots.
    writer_queue, reader_queue = max(1, settings.max_requests // 4), settings.max_requests
    writer = serve.deployment(
        WriterActor, name="writer", num_replicas=1, max_queued_requests=writer_queue, **options
    )
    reader = serve.deployment(
        ReaderActor,
        name="reader",
        num_replicas=fleet.replicas,
        max_queued_requests=reader_queue,
        **options,
    )
    return reader.bind(folder, settings, writer.bind(folder, settings, canary))


@contextlib.contextmanager
def deploy(
    fleet: FleetSettings, host: str, port: int, canary: Canary | None = None
) -> Iterator[None]:
    """Run a fleet while the context is open."""
    check_learner(fleet.folder)
    with lock_folder(fleet.folder):
        pass  # raises here if another process writes, instead of in an actor
    with ray_cluster(fleet.replicas + 1, "--replicas"):
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(http_options={"host": host, "port": port})
        try:
            _run(build_deployment(fleet, canary))
            yield
        finally:
            serve.delete("dosapp")  # waits for the writer to save; other applications stay


def _run(deployment: Any) -> None:
    try:
        serve.run(deployment, name="dosapp")
    except RuntimeError as error:
        reason = [line for line in str(error).splitlines() if line.strip()][-1].strip()
        raise InputError(f"the fleet could not be started: {reason}") from error
