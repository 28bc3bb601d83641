"""The FastAPI app of a service: routes, request ids, the log line of a request, error answers."""

import asyncio
import logging
import time
from collections.abc import Mapping
from importlib.metadata import version as installed_version
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi_offline import FastAPIOffline
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
from dosapp.service.http.limits import Limits
from dosapp.service.http.metrics import Metrics
from dosapp.service.http.requests import ThreadPools, choose_request_id, describe_first
from dosapp.service.http.routes import DOCS_FILES, router
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
PROBES = ("/health", "/ready")  # answered at once, with or without a token
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
        RequestMiddleware, metrics=app.state.metrics, limits=app.state.limits
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

    def __init__(self, app: ASGIApp, metrics: Metrics, limits: Limits) -> None:
        self.app, self.metrics, self.limits = app, metrics, limits

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
                await asyncio.sleep(self._delay(scope, status))
                if has_body and status != TOO_SLOW:
                    await self._drain(receive_watched, scope)
                if has_body:  # the rest is not read
                    headers["Connection"] = "close"
                headers["X-Request-Id"] = request_id
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self.app(scope, receive_watched, send_with_id)
        except ClientDisconnect:
            pass
        except Exception as error:
            if status != CLOSED_BY_CLIENT:
                raise  # an answer has begun
            await error_response(error, request_id)(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - started
            self.metrics.observe(getattr(scope.get("route"), "path", "other"), status, seconds)
            _log_request(scope, status, seconds)

    def _delay(self, scope: Scope, status: int) -> float:
        """Seconds that an answer waits: an immediate one would invite the next request."""
        key = _key(scope)
        if 400 <= status < 500 and status != TOO_SLOW:
            return self.limits.refusals.delay(key)
        is_page = "caller" not in scope["state"] and scope["path"] not in PROBES
        return self.limits.reads.delay(key) if is_page else 0.0

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
