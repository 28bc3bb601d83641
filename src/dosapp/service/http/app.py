"""The FastAPI app of a service: routes, request ids, the log line of a request, error answers."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version as installed_version
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dosapp.errors import (
    BusyError,
    CorruptRecordError,
    DivergedError,
    DosappError,
    InputError,
    ReadOnlyError,
    StorageError,
    TooLargeError,
    UnavailableError,
)
from dosapp.service.http.auth import has_valid_token
from dosapp.service.http.limits import Limits
from dosapp.service.http.metrics import Metrics
from dosapp.service.http.requests import ThreadPools, choose_request_id, describe_first
from dosapp.service.http.routes import DOCS_FILES, health, ready, router
from dosapp.service.http.schemas import ErrorResponse
from dosapp.service.service import Service

# 4xx: the caller can change the request. 5xx: an operator must look, so alerts fire.
STATUS_CODES: dict[type[DosappError], int] = {
    InputError: 400,
    TooLargeError: 413,
    BusyError: 429,
    UnavailableError: 503,
    ReadOnlyError: 409,
    StorageError: 507,
    CorruptRecordError: 500,
    DivergedError: 500,
    DosappError: 500,
}
HEADERS = {429: {"Retry-After": "1"}}
CLOSED_BY_CLIENT = 499  # in log and metrics, when there was nothing to answer
TOO_SLOW = 408
PROBES: dict[str, Callable[[Service], Awaitable[BaseModel]]] = {  # answered soon, to everyone
    "/health": lambda _: health(),
    "/ready": ready,
}
PAGES = ("/", "/app.css", "/app.js", "/openapi.json", "/docs")  # that need no token
PAGE_FOLDERS = ("/samples/", "/docs/")
ERROR_CODES = (400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 500, 503, 507)
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",  # pages have their own
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}

logger = logging.getLogger("dosapp.service.http")


def build_app(service: Service) -> FastAPI:
    """Build the app of a running service.

    Args:
        service: Answers the requests; when it closes, the app's threads end.

    Returns:
        An ASGI app, with its interface at `/openapi.json` and `/docs`.
    """
    app: FastAPI = FastAPIOffline(  # serves the scripts of /docs itself
        static_url=DOCS_FILES,
        docs_url=None,
        redoc_url=None,
        title="DoSAPP",
        version=installed_version("dosapp"),
        description="A CLIP classifier that learns new classes and keeps the old ones.",
        responses={code: {"model": ErrorResponse} for code in ERROR_CODES},
    )
    app.state.service, app.state.metrics = service, Metrics()
    app.state.limits, app.state.pools = Limits(service.settings), ThreadPools(service.settings)
    service.at_close.callback(app.state.pools.close)
    app.add_middleware(app.state.limits.middleware)
    app.add_middleware(  # the outer one
        RequestMiddleware,
        service=service,
        metrics=app.state.metrics,
        limits=app.state.limits,
    )

    @app.exception_handler(DosappError)
    async def answer_error(request: Request, error: DosappError) -> Response:
        return error_response(error, request.state.request_id)

    @app.exception_handler(RequestValidationError)
    async def answer_invalid(request: Request, error: RequestValidationError) -> Response:
        return _error_body(422, describe_first(error.errors()), request.state.request_id)

    @app.exception_handler(HTTPException)
    async def answer_http(request: Request, error: HTTPException) -> Response:
        request_id = request.state.request_id
        return _error_body(error.status_code, error.detail, request_id, error.headers)

    app.include_router(router)
    return app


def status_code(error: DosappError) -> int:
    """Look up the status code of an error by its kind.

    Example:
        >>> status_code(StorageError("the disk is full"))
        507
    """
    return next(STATUS_CODES[kind] for kind in type(error).__mro__ if kind in STATUS_CODES)


def error_response(error: Exception, request_id: str) -> Response:
    """Turn an error into an answer; those of an operator's concern are also logged."""
    if not isinstance(error, DosappError):
        logger.error("unexpected error in request %s", request_id, exc_info=error)
        message = "internal error; the service's log has more under this request_id"
        return _error_body(500, message, request_id)
    code = status_code(error)
    if code >= 500:
        logger.error("%s in request %s: %s", type(error).__name__, request_id, error)
    return _error_body(code, str(error), request_id, HEADERS.get(code))


def _error_body(
    code: int, message: str, request_id: str, headers: Mapping[str, str] | None = None
) -> Response:
    return JSONResponse({"error": message, "request_id": request_id}, code, headers)


class RequestMiddleware:
    """Gives every request an id, counts it, logs it, and answers errors raised outside of routes.

    Every answer gets the security headers.

    The log line has method, path, status, milliseconds, caller and request id; never a body, a
    query string or a token.
    """

    def __init__(self, app: ASGIApp, service: Service, metrics: Metrics, limits: Limits) -> None:
        self.app, self.service, self.metrics, self.limits = app, service, metrics, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = choose_request_id(Headers(scope=scope))
        scope.setdefault("state", {})["request_id"] = request_id
        started, status = time.perf_counter(), CLOSED_BY_CLIENT
        headers = Headers(scope=scope)
        has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"

        async def receive_watched() -> Message:
            nonlocal has_body
            message = await receive()
            has_body = has_body and bool(message.get("more_body"))
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                await self._wait(scope, status)
                if has_body and status != TOO_SLOW:
                    await self._drain(receive_watched, scope)
                if has_body:  # the rest is not read
                    headers["Connection"] = "close"
                headers["X-Request-Id"] = request_id
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        is_probe = scope["path"] in PROBES and scope["method"] == "GET"
        try:
            # Before the web framework, which takes most of the time of a refusal.
            authorization = Headers(scope=scope).get("authorization", "")
            is_known = is_probe or has_valid_token(self.service, authorization)
            if is_known or await self._wait_unknown(scope):
                await (self._probe if is_probe else self.app)(scope, receive_watched, send_with_id)
        except ClientDisconnect:
            pass
        except Exception as error:
            if status != CLOSED_BY_CLIENT:
                raise  # an answer has begun
            await error_response(error, request_id)(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.observe(scope["path"] if is_probe else route, status, seconds)
            _log_request(scope, status, seconds)

    async def _probe(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a probe as its route does, which would take several times as long."""
        try:
            content = await PROBES[scope["path"]](self.service)
        except HTTPException as error:
            answer = _error_body(error.status_code, error.detail, scope["state"]["request_id"])
        else:
            answer = JSONResponse(content.model_dump())
        await answer(scope, receive, send)

    async def _wait_unknown(self, scope: Scope) -> bool:
        """Let a request without a valid token wait; return whether its sender still does."""
        is_page = scope["path"] in PAGES or scope["path"].startswith(PAGE_FOLDERS)
        scope["state"]["has_waited"] = True
        pacer = self.limits.reads if is_page else self.limits.refusals
        return await self._pause(scope, pacer.delay(_key(scope)))

    async def _wait(self, scope: Scope, status: int) -> None:
        """Let an answer wait: an immediate one would invite the next request."""
        if "has_waited" in scope["state"]:
            return
        if 400 <= status < 500 and status != TOO_SLOW:
            await self._pause(scope, self.limits.refusals.delay(_key(scope)))
        elif scope["path"] in PROBES and "caller" not in scope["state"]:
            # Those that have waited longest must not all be answered at the same moment.
            await asyncio.sleep(self.limits.probes.delay(_key(scope)) * random.uniform(0.7, 1))

    async def _pause(self, scope: Scope, seconds: float) -> bool:
        """Wait, and return whether the connection is still open.

        `state["waiting"]` tells the connection that it may be closed for others; it then ends the
        wait.
        """
        if not seconds:
            return True
        ended = scope["state"]["waiting"] = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), seconds * random.uniform(0.7, 1))
        return not ended.is_set()

    async def _drain(self, receive: Receive, scope: Scope) -> None:
        """Read the beginning of a refused body, so that its sender gets to read the answer."""
        try:
            async with asyncio.timeout(1):
                for _ in range(64):
                    message = await receive()
                    if not message.get("more_body"):
                        return
                    count = len(message.get("body", b""))
                    await asyncio.sleep(self.limits.bytes.delay(_key(scope), count=count))
        except TimeoutError:
            return


def _key(scope: Scope) -> str:
    """Whose requests are paced together: those of a caller, or of an address without a token."""
    return str(scope["state"].get("caller") or (scope.get("client") or ("",))[0])


def _log_request(scope: Scope, status: int, seconds: float) -> None:
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": quote(scope["path"][:200], safe="/"),  # no line breaks
        "status": status,
        "milliseconds": round(1000 * seconds, 1),
        "caller": scope["state"].get("caller", "-"),
        "request_id": scope["state"]["request_id"],
    }
    level = logging.WARNING if status >= 500 else logging.INFO
    message = "%(method)s %(path)s %(status)d %(milliseconds)s ms %(caller)s %(request_id)s"
    logger.log(level, message, fields, extra={"fields": fields})
