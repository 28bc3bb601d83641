"""Limits of requests: bytes and seconds of a body, and what one caller may have at a time."""

import asyncio
import contextlib
import math
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from weakref import WeakValueDictionary

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dosapp.errors import BusyError, InputError, TooLargeError
from dosapp.service.settings import ServiceSettings

MAX_CLIENTS = 10_000  # whose rate is remembered
MAX_DELAY = 5.0  # seconds
MIN_RATE = 20_000  # bytes per second of a body, after its first seconds
MAX_BYTE_RATE = 16_000_000  # bytes per second of a caller's large bodies: reading them takes time
LARGE_BODY = 256_000  # bytes; a caller's bodies above it are read a few at a time
MAX_QUERY = 1_000  # bytes; every route takes a few short parameters
JSON_SHARE = 8  # a JSON body has at most this part of `max_body`: parsing needs several times it


class Pacer:
    """Spreads events, or bytes, of the same key over time: after a burst they come at a rate.

    Args:
        rate: Events per second.
        burst: Events that need not wait.
        max_delay: Seconds that an event waits at most; `MAX_DELAY` unless given.

    Example:
        >>> pacer = Pacer(rate=10, burst=2)
        >>> [round(pacer.delay("a", now=0.0), 1) for _ in range(4)]
        [0.0, 0.0, 0.1, 0.2]
    """

    def __init__(self, rate: float, burst: float, max_delay: float | None = None) -> None:
        self.rate, self.burst = rate, burst
        self.max_delay = MAX_DELAY if max_delay is None else max_delay
        self._due: OrderedDict[str, float] = OrderedDict()

    def delay(self, key: str, now: float | None = None, count: float = 1) -> float:
        """Return the seconds that the next event of a key must wait.

        Args:
            key: Whose event it is.
            now: The time; None for that of the clock.
            count: How many events come together.
        """
        now = time.monotonic() if now is None else now
        due = max(self._due.pop(key, -math.inf), now - (self.burst - 1) / self.rate)
        wait = min(self.max_delay, max(0.0, due - now))
        self._due[key] = min(due, now + self.max_delay) + count / self.rate
        while len(self._due) > MAX_CLIENTS:
            self._due.popitem(last=False)
        return wait


@dataclass
class Slot:
    """A request of a known caller, and the bytes of its body that are in memory."""

    caller: str
    size: int = 0


class Limits:
    """The limits of one app. Exceeding one raises an error before anything is read or done.

    Slots are taken by callers that are known: a request without a valid token takes none. A caller
    without a request is always let in, so others cannot keep it out.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        # Of a caller, or of an address without a token: GET requests, and answers 4xx.
        self.reads = Pacer(rate=50, burst=100)
        self.refusals = Pacer(rate=20, burst=40)
        self.probes = Pacer(rate=50, burst=100, max_delay=0.6)  # an operator must not wait long
        # Milliseconds of parsing forms, of a caller: parts may be made to be slow to find.
        self.parsing = Pacer(rate=200, burst=200)
        self.bytes = Pacer(rate=MAX_BYTE_RATE, burst=LARGE_BODY)  # of a caller's large bodies
        self._active: Counter[str] = Counter()  # requests of each caller
        self._sizes: Counter[str] = Counter()  # bytes of bodies in memory, of each caller
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def check_rate(self, client: str) -> None:
        """Take a token from a client's bucket, which holds two seconds of the allowed rate.

        Raises:
            BusyError: The bucket is empty.
        """
        rate = self.settings.max_rate
        if not rate:
            return
        capacity, now = max(1.0, 2 * rate), time.monotonic()
        with self._lock:
            level, then = self._buckets.pop(client, (capacity, now))
            level = min(capacity, level + (now - then) * rate)
            is_allowed = level >= 1
            self._buckets[client] = (level - 1 if is_allowed else level, now)
            while len(self._buckets) > MAX_CLIENTS:
                self._buckets.popitem(last=False)
        if not is_allowed:
            raise BusyError(f"more than {rate:g} requests per second; slow down")

    @contextlib.contextmanager
    def hold_slot(self, caller: str) -> Iterator[Slot]:
        """Take one of a caller's slots until the end of the block.

        Raises:
            BusyError: All of its slots are taken, or those of all callers.
        """
        own, most = self._active[caller], self.settings.max_caller_requests
        if own >= most:
            raise BusyError(f"{most} requests of one caller at once are the limit")
        if own and self._active.total() >= self.settings.max_requests:
            raise BusyError(f"{self.settings.max_requests} requests at once are the limit")
        self._active[caller] += 1
        slot = Slot(caller)
        try:
            yield slot
        finally:
            self._active[caller] -= 1
            self._sizes[caller] -= slot.size
            for counter in (self._active, self._sizes):
                if not counter[caller]:
                    del counter[caller]

    @contextlib.asynccontextmanager
    async def wait_for_turn(self, caller: str, headers: Headers) -> AsyncIterator[None]:
        """Wait until few large requests of a caller are at work; this one is not read before."""
        length = headers.get("content-length", "0" if "transfer-encoding" not in headers else "")
        if length.isdigit() and int(length) <= LARGE_BODY:
            yield
            return
        turns = self._turns.get(caller)
        if turns is None:
            turns = self._turns[caller] = asyncio.Semaphore(max(1, (os.cpu_count() or 1) // 2))
        async with turns:
            yield

    def count_bytes(self, slot: Slot, count: int) -> None:
        """Count bytes that were read for a request.

        All bodies of a caller together are at most as large as one may be, and those of all
        callers twice as large; beyond that each caller has a quarter of one.

        Raises:
            BusyError: Bodies of other requests take the room.
        """
        slot.size += count
        self._sizes[slot.caller] += count
        own, most = self._sizes[slot.caller], self.settings.max_body
        is_full = self._sizes.total() > 2 * most and own > most // 4
        if own > slot.size and (own > most or is_full):
            raise BusyError("other requests of this caller are too large; send one at a time")
        if is_full:
            raise BusyError("the bodies of other requests take all room; try again later")

    def check_length(self, headers: Headers) -> int:
        """Return how many bytes the body may have.

        Raises:
            InputError: The content length is not a number.
            TooLargeError: It is above the limit.
        """
        kind, length = headers.get("content-type", ""), headers.get("content-length", "0")
        most = self.settings.max_body // (JSON_SHARE if kind.startswith("application/json") else 1)
        if not length.isdigit():
            raise InputError("the content length is not a number")
        if "content-length" in headers and "transfer-encoding" in headers:
            raise InputError("a request has a content length or a transfer encoding, not both")
        if int(length) > most:
            raise self.body_error(most)
        return most

    def body_error(self, most: int | None = None) -> TooLargeError:
        """Build the error for a body that is too large."""
        kind = "a JSON body" if most and most < self.settings.max_body else "a body"
        return TooLargeError(f"{kind} has at most {most or self.settings.max_body:,} bytes")

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Wrap an app: limit the bytes that it can read of a request, and the time they take."""

        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            if len(scope["query_string"]) > MAX_QUERY:
                raise InputError(f"the query has more than {MAX_QUERY:,} bytes; send fewer")
            most, received, started = self.check_length(Headers(scope=scope)), 0, 0.0
            is_complete = False

            async def receive_counted() -> Message:
                nonlocal received, started, is_complete
                if is_complete:  # all that can come is the end of the connection
                    return await receive()
                started = started or time.monotonic()  # the request may have waited for its turn
                left = started + self.settings.body_timeout + received / MIN_RATE - time.monotonic()
                try:
                    async with asyncio.timeout(max(0.0, left)):
                        message = await receive()
                except TimeoutError as error:
                    raise HTTPException(408, "the body came too slowly; send it again") from error
                is_complete = not message.get("more_body", False)
                count = len(message.get("body", b""))
                received += count
                if received > most:
                    raise self.body_error(most)
                if "slot" in scope["state"]:
                    slot = scope["state"]["slot"]
                    self.count_bytes(slot, count)
                    if received > LARGE_BODY:
                        await asyncio.sleep(self.bytes.delay(slot.caller, count=count))
                return message

            await app(scope, receive_counted, send)

        return limited
