"""How the service listens: uvicorn, with limits for what is read before a caller is known."""

import asyncio
import math
import re
from collections import Counter
from typing import Any

import h11
import uvicorn
from h11._readers import ChunkedReader  # private, as `_reader` is: h11 cannot be told otherwise
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from dosapp.service.http.auth import has_valid_token
from dosapp.service.http.limits import Pacer
from dosapp.service.service import Service

MAX_HEADER_BYTES = 32_768
MAX_HEADERS = 100  # lines; parsing thousands of short ones would hold up other requests
BLANK_LINE = re.compile(rb"\n\r?\n")  # ends the headers
AUTHORIZATION = re.compile(rb"\r?\nauthorization:[ \t]*([^\r\n]*)", re.IGNORECASE)
PROBE_STARTS = (b"GET /health ", b"GET /ready ")
SPARE_CONNECTIONS = 64  # above the limit, until they have sent a valid token or are closed
FULL_DELAY = 1.0  # seconds
FLUSH_WAIT = 1.0  # seconds that a connection has to read the rest of an answer when it is closed
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
SMALL_CHUNK = 512  # bytes; parsing a chunk takes as long as reading some kilobytes
CHUNKS_AT_ONCE = 64  # small ones, between which other connections get their turn


class PacedConnection(h11.Connection):
    """Parses a limited number of small chunks at once, and no lines behind the last chunk."""

    small_chunks = 0  # since it was last set to zero

    def next_event(self) -> Any:
        """Return the next event; after too many small chunks that more data is needed."""
        if self.small_chunks >= CHUNKS_AT_ONCE:
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Data) and event.chunk_start and len(event.data) < SMALL_CHUNK:
            self.small_chunks += 1
        if isinstance(event, h11.Request) and isinstance(self._reader, ChunkedReader):
            self._reader = BareChunkedReader()
        return event


class BareChunkedReader(ChunkedReader):
    """Refuses header lines behind a body, which have no use here: h11 would parse thousands.

    No public name of h11 tells that a body has ended before these lines are parsed. So its version
    is bounded in pyproject.toml, and a test sends such lines.
    """

    def __call__(self, buf: Any) -> Any:
        """Read the next event from a buffer."""
        if self._reading_trailer and bytes(buf)[:1] not in (b"", b"\r", b"\n"):
            raise h11.LocalProtocolError("lines behind the last chunk")
        return super().__call__(buf)


def make_config(app: ASGIApp, service: Service) -> Any:
    """Build uvicorn's configuration for the app of a service.

    h11 limits the bytes of headers; uvicorn itself has no time limit for them.
    """
    return uvicorn.Config(
        app,
        http=make_protocol(service),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # a header must not decide who the caller is
        backlog=2048,
        timeout_keep_alive=math.ceil(service.settings.header_timeout),  # after an answer
        timeout_graceful_shutdown=30,
    )


def make_protocol(service: Service) -> type:
    """Build the class of connections with the limits of a service."""
    settings = service.settings
    malformed = Pacer(rate=5, burst=20)  # requests of an address that are no HTTP, or too long
    chunks = Pacer(rate=5000, burst=1000)  # small ones of an address

    def is_welcome(data: bytes) -> bool:
        """Whether a request that begins so has a valid token or is a probe, judged unparsed."""
        found = AUTHORIZATION.search(data)
        given = found[1].decode("latin-1") if found else ""
        return data.startswith(PROBE_STARTS) or has_valid_token(service, given)

    class LimitedProtocol(H11Protocol):  # type: ignore[misc]
        """Closes a connection whose request does not come in time, or that others need more."""

        deadline: asyncio.TimerHandle | None = None
        pause: asyncio.TimerHandle | None = None  # until more chunks are parsed
        unread: asyncio.TimerHandle | None = None  # until an answer that is not read is given up
        is_malformed = False
        idle_since = 0.0

        def __init__(self, config: uvicorn.Config, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            self.conn = PacedConnection(h11.SERVER, MAX_HEADER_BYTES)

        @property
        def address(self) -> str:
            """Of the other side."""
            return self.client[0] if self.client else ""

        @property
        def is_idle(self) -> bool:
            """Whether no request is being answered."""
            return self.cycle is None or self.cycle.response_complete

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.idle_since = self.loop.time()
            self._start_deadline()
            if len(self.connections) > settings.max_connections + SPARE_CONNECTIONS:
                self._make_room()

        def _make_room(self) -> None:
            """Close the connection that matters least; this one if all others are at work."""
            others = (c for c in self.connections if c is not self and not c.transport.is_closing())
            known = []
            for victim in others:
                if victim.worth == 0:  # usual in a flood, so the others are not looked at
                    break
                known.append(victim)
            else:
                crowd = Counter(c.address for c in known)
                keys = {c: (c.worth, -crowd[c.address], c.idle_since) for c in known}
                free = [c for c in known if keys[c][0] < 3]
                victim = min(free, key=keys.__getitem__, default=self)
            victim.end()

        def end(self) -> None:
            """Close the connection, also if the other side does not read what was sent."""
            self.transport.close()
            if self.transport.get_write_buffer_size():
                self.loop.call_later(FLUSH_WAIT, self.transport.abort)

        def pause_writing(self) -> None:
            """Called when the other side does not read; after a while it is not waited for."""
            super().pause_writing()
            self.unread = self.loop.call_later(settings.body_timeout, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self.unread is not None:
                self.unread.cancel()

        def timeout_keep_alive_handler(self) -> None:
            """Called when no other request has come for some seconds."""
            super().timeout_keep_alive_handler()
            self.end()

        @property
        def worth(self) -> int:
            """From 0, refused or waiting for a refusal, to 3, at work for a known caller."""
            state = self.scope["state"] if self.scope else {}
            if self.is_malformed or "waiting" in state:
                return 0
            if "caller" not in state:
                return 1
            return 2 if self.is_idle else 3

        def _refuse_unread(self) -> None:
            """Refuse a request before it is parsed, after a while: its sender will come again."""
            self.is_malformed = True
            self.transport.pause_reading()
            self.loop.call_later(FULL_DELAY, self._end_unread)

        def _end_unread(self) -> None:
            if not self.transport.is_closing():
                self.transport.write(FULL)
                self.end()

        def data_received(self, data: bytes) -> None:
            if self.is_malformed:
                return
            if self.cycle is None and len(self.connections) > settings.max_connections:
                if not is_welcome(data):
                    self._refuse_unread()
                    return
                self._make_room()
            super().data_received(data)
            if self.pause is not None:  # the app has asked for more
                self.transport.pause_reading()
            if not self.is_idle:
                self._end_deadline()
            elif self.deadline is None:
                self._start_deadline()

        def handle_events(self) -> None:
            """Handle what has come, unless a request begins with too many headers.

            The rest of many small chunks is handled later.
            """
            if self.pause is not None or self.is_malformed:
                return
            if self.conn.their_state is h11.IDLE:
                head = self.conn.trailing_data[0]
                blank = BLANK_LINE.search(head)
                end = blank.start() if blank else len(head)
                # h11 has a limit of its own, but only for headers that are not complete yet.
                if end > MAX_HEADER_BYTES or head.count(b"\n", 0, end) > MAX_HEADERS:
                    self.send_400_response("Too many headers, or too long ones.")
                    return
            super().handle_events()
            if self.conn.small_chunks >= CHUNKS_AT_ONCE and not self.transport.is_closing():
                self.transport.pause_reading()
                delay = chunks.delay(self.address, count=CHUNKS_AT_ONCE)
                self.pause = self.loop.call_later(delay, self._go_on)

        def _go_on(self) -> None:
            """Handle what came before reading was paused, and read more."""
            self.pause, self.conn.small_chunks = None, 0
            self.handle_events()
            if self.pause is None and not (self.is_malformed or self.flow.read_paused):
                self.transport.resume_reading()

        def on_response_complete(self) -> None:
            self.idle_since = self.loop.time()
            super().on_response_complete()

        def send_400_response(self, msg: str) -> None:
            """Answer a request that cannot be parsed; later and later if there are many."""
            self.is_malformed = True
            self.transport.pause_reading()
            answer = super().send_400_response

            def answer_or_close() -> None:
                if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                    self.end()  # another answer has begun
                elif not self.transport.is_closing():
                    answer(msg)

            self.loop.call_later(malformed.delay(self.address), answer_or_close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_deadline()
            for timer in (self.pause, self.unread):
                if timer is not None:
                    timer.cancel()
            if self.scope and (waiting := self.scope["state"].get("waiting")):
                waiting.set()
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
                self.end()

    return LimitedProtocol
