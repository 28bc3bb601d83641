"""How the service listens: uvicorn, with limits for connections that send no request."""

import asyncio
import re
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from dosapp.service.http.limits import Pacer
from dosapp.service.settings import ServiceSettings

MAX_HEADER_BYTES = 32_768
MAX_HEADERS = 100  # lines; parsing thousands of short ones would hold up other requests
BLANK_LINE = re.compile(rb"\n\r?\n")  # ends the headers


def make_config(app: ASGIApp, settings: ServiceSettings) -> Any:
    """Build uvicorn's configuration for the app of a service.

    h11 limits the bytes of headers; uvicorn itself has no time limit for them.
    """
    return uvicorn.Config(
        app,
        http=make_protocol(settings),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # a header must not decide who the caller is
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        backlog=2048,
        timeout_graceful_shutdown=30,
    )


def make_protocol(settings: ServiceSettings) -> type:
    """Build the class of connections with the limits of a service."""
    malformed = Pacer(rate=5, burst=20)  # requests of an address that are no HTTP, or too long

    class LimitedProtocol(H11Protocol):  # type: ignore[misc]
        """Closes a connection whose request does not come in time, or that others need more."""

        deadline: asyncio.TimerHandle | None = None

        @property
        def is_idle(self) -> bool:
            """Whether no request is being answered."""
            return self.cycle is None or self.cycle.response_complete

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start_deadline()
            if len(self.connections) > settings.max_connections:
                idle = [c for c in self.connections if c.is_idle and c is not self]
                # The one that has waited longest; a new one only if all are at work.
                victim = min(
                    idle, key=lambda c: c.deadline.when() if c.deadline else 0, default=self
                )
                victim.transport.close()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self.is_idle:
                self._end_deadline()
            elif self.deadline is None:
                self._start_deadline()

        def handle_events(self) -> None:
            """Handle what has come, unless a request begins with too many headers."""
            if self.conn.their_state is h11.IDLE:
                head = self.conn.trailing_data[0]
                blank = BLANK_LINE.search(head)
                if head.count(b"\n", 0, blank.start() if blank else len(head)) > MAX_HEADERS:
                    self.send_400_response("Too many headers.")
                    return
            super().handle_events()

        def send_400_response(self, msg: str) -> None:
            """Answer a request that cannot be parsed; later and later if there are many."""
            self.transport.pause_reading()
            answer = super().send_400_response
            delay = malformed.delay(self.client[0] if self.client else "")
            asyncio.get_running_loop().call_later(
                delay, lambda: None if self.transport.is_closing() else answer(msg)
            )

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_deadline()
            super().connection_lost(exc)

        def _start_deadline(self) -> None:
            loop = asyncio.get_running_loop()
            self.deadline = loop.call_later(settings.header_timeout, self._close_idle)

        def _end_deadline(self) -> None:
            if self.deadline is not None:
                self.deadline.cancel()
                self.deadline = None

        def _close_idle(self) -> None:
            self.deadline = None
            if self.is_idle:
                self.transport.close()

    return LimitedProtocol
