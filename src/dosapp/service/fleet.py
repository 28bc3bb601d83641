"""One writer and many readers on a Ray cluster, behind one port: the same app, the same folder.

    request ─ Ray's proxy ─ Reading (one of N) ─ answers
                               └─ what only the writer can do, and pictures answered ─ Writing (one)

The folder must be one that every node can see. Readers follow it as any replica does; its lock sees
to it that there is never a second writer, whatever Ray starts. Ray starts again what dies.
"""

import asyncio
import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator
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
from dosapp.learner.learner import Prediction
from dosapp.runtime.files import lock_folder
from dosapp.service.guards import Canary
from dosapp.service.http.app import build_app
from dosapp.service.reader import Answer
from dosapp.service.service import Replica, Service, open_service, running
from dosapp.service.settings import ServiceSettings, check_learner
from dosapp.settings import Settings

PATIENCE = 30.0  # seconds to wait for the folder
GRACE = 50.0  # seconds an actor has to answer and save; `serve.delete` waits for sixty
OWN = ("/", "/predict", "/classes", "/versions", "/health", "/ready", "/docs", "/openapi.json")
FIELDS = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string")
MORE = ("root_path", "headers", "client", "server")  # of a scope; what else is in it stays here
RawResponse = tuple[int, list[tuple[bytes, bytes]], bytes]  # status, headers, body
Offer = Callable[[Tensor, list[Prediction]], None]


class Fleet(Settings):
    """What `serve run dosapp.service.fleet:application` is given, as `name=value` or in YAML."""

    folder: Path = Field(description="a learner's folder that every node can see")
    replicas: int = Field(2, ge=1, description="readers")
    service: ServiceSettings = ServiceSettings()


class Following(Replica):
    """A replica that passes on the pictures it has answered."""

    def __init__(self, folder: Path, settings: ServiceSettings, offer: Offer) -> None:
        super().__init__(folder, settings)
        self._offer = offer

    def answered_with(self, pixels: Tensor, answer: Answer, learn: bool) -> None:
        super().answered_with(pixels, answer, learn)
        if learn and self.settings.adapt:
            self._offer(pixels, answer.predictions)


class Serving:
    """A service and its app inside an actor."""

    def __init__(self, made: Callable[[], contextlib.AbstractContextManager[Service]]) -> None:
        self._open = contextlib.ExitStack()
        until = time.monotonic() + PATIENCE
        while True:  # the last writer may not have ended, or be mending what a reader wants to read
            try:
                self.service = self._open.enter_context(made())
                break
            except (DosappError, OSError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)
        self.app = build_app(self.service)

    def check_health(self) -> None:
        """Ray asks; an error makes it start another."""
        if not self.service.ready:
            raise RuntimeError("reader or writer is not at work")

    def __del__(self) -> None:  # Ray's way to say that it is over
        if hasattr(self, "_open"):
            self._open.close()


class Writing(Serving):
    def __init__(self, folder: Path, settings: ServiceSettings, canary: Canary | None) -> None:
        super().__init__(lambda: open_service(folder, settings, canary=canary))

    async def answer(self, scope: Scope, body: bytes) -> RawResponse:
        """A request that came to a reader."""
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return messages.pop() if messages else {"type": "http.disconnect"}

        return await said(self.app, scope, receive)

    async def offer(self, pixels: Any, predictions: list[Prediction]) -> None:
        answer = Answer(self.service.version, predictions)
        self.service.answered_with(torch.from_numpy(pixels), answer, learn=True)


class Reading(Serving):
    def __init__(self, folder: Path, settings: ServiceSettings, writer: Any) -> None:
        self._writer = writer
        self._offers: set[asyncio.Task[None]] = set()
        super().__init__(lambda: running(Following(folder, settings, self._offer)))

    async def __call__(self, request: Request) -> Response:
        path = request.scope["path"]
        if path in OWN or path.startswith(("/versions/", "/docs/")):
            return response(await said(self.app, request.scope, request.receive))
        return await self._forwarded(request)

    async def _forwarded(self, request: Request) -> Response:
        most, body = self.service.settings.max_body, b""
        async for part in request.stream():
            body += part
            if len(body) > most:
                return JSONResponse({"error": f"a body has at most {most:,} bytes"}, 413)
        scope = {name: request.scope.get(name) for name in FIELDS + MORE}
        try:
            return response(await self._writer.answer.remote(scope, body))
        except BackPressureError:
            words = "too much waits for the writer, or it is being started again; try again later"
            return JSONResponse({"error": words}, 429, {"Retry-After": "1"})
        except RayError:
            return JSONResponse({"error": "the writer has died; another is being started"}, 503)

    def _offer(self, pixels: Tensor, predictions: list[Prediction]) -> None:
        task = asyncio.ensure_future(self._offered(pixels, predictions))
        self._offers.add(task)  # or it might be forgotten before it has run
        task.add_done_callback(self._offers.discard)

    async def _offered(self, pixels: Tensor, predictions: list[Prediction]) -> None:
        try:
            await self._writer.offer.remote(pixels.numpy(), predictions)
        except Exception as error:  # the writer is being started again: an answer is an answer
            warnings.warn(f"pictures were not learned from ({error})", stacklevel=1)


async def said(app: ASGIApp, scope: Scope, receive: Receive) -> RawResponse:
    """What an app answers, whole."""
    status, headers, body = 500, [], b""

    async def send(message: Message) -> None:
        nonlocal status, headers, body
        if message["type"] == "http.response.start":
            status, headers = message["status"], [tuple(h) for h in message["headers"]]
        else:
            body += message.get("body", b"")

    await app(scope, receive, send)
    return status, headers, body


def response(said: RawResponse) -> Response:
    status, headers, body = said
    found = Response(body, status)
    found.raw_headers = headers
    return found


def application(fleet: Fleet) -> Any:
    """For `serve run` and Serve's config files, which hand over one argument."""
    return _bound(fleet, None)


def _bound(fleet: Fleet, canary: Canary | None) -> Any:
    folder, settings = fleet.folder.resolve(), fleet.service
    places = {n: p.resolve() for n in ("canary", "lessons") if (p := getattr(settings, n))}
    settings = settings.model_copy(update=places)  # actors have another working directory
    usual = {"max_ongoing_requests": settings.max_requests, "graceful_shutdown_timeout_s": GRACE}
    # What waits for a writer that is not there must not take all the readers' places.
    few = {"max_queued_requests": max(1, settings.max_requests // 4)}
    many = {"max_queued_requests": settings.max_requests}
    writing = serve.deployment(Writing, name="writer", num_replicas=1, **usual, **few)
    reading = serve.deployment(Reading, name="reader", num_replicas=fleet.replicas, **usual, **many)
    return reading.bind(folder, settings, writing.bind(folder, settings, canary))


@contextlib.contextmanager
def deployed(fleet: Fleet, host: str, port: int, canary: Canary | None = None) -> Iterator[None]:
    """At work until the block ends."""
    check_learner(fleet.folder)
    with lock_folder(fleet.folder):
        pass  # or one sentence here, not a traceback from an actor
    with ray_cluster(fleet.replicas + 1, "--replicas"):
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(http_options={"host": host, "port": port})
        try:
            _run(_bound(fleet, canary))
            yield
        finally:
            serve.delete("dosapp")  # waits for the writer to save; other applications stay


def _run(app: Any) -> None:
    try:
        serve.run(app, name="dosapp")
    except RuntimeError as error:
        why = [line for line in str(error).splitlines() if line.strip()][-1].strip()
        raise InputError(f"the fleet could not be started: {why}") from error
