"""Limits of requests: bytes of a body, concurrent requests, requests per second of a client."""

import asyncio
import threading
import time
from collections import OrderedDict

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dosapp.errors import BusyError, InputError, TooLargeError
from dosapp.service.settings import ServiceSettings

MAX_CLIENTS = 10_000  # whose rate is remembered


class Limits:
    """The limits of one app. Exceeding one raises an error before anything is read or done."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self.active = 0  # requests
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

    def body_error(self) -> TooLargeError:
        """Build the error for a body that is too large."""
        return TooLargeError(f"a body has at most {self.settings.max_body:,} bytes")

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Wrap an app: limit its concurrent requests and the bytes it can read of each."""

        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            received = 0

            async def receive_counted() -> Message:
                nonlocal received
                message = await receive()
                received += len(message.get("body", b""))
                if received > self.settings.max_body:
                    raise self.body_error()
                return message

            self.active += 1
            try:
                length = Headers(scope=scope).get("content-length", "0")
                if self.active > self.settings.max_requests:
                    raise BusyError(f"{self.settings.max_requests} requests at once are the limit")
                if not length.isdigit():
                    raise InputError("the content length is not a number")
                if int(length) > self.settings.max_body:
                    await _drain(receive)
                    raise self.body_error()
                await app(scope, receive_counted, send)
            finally:
                self.active -= 1

        return limited


async def _drain(receive: Receive) -> None:
    """Read the beginning of a refused body, so that its sender gets to read the answer."""
    try:
        async with asyncio.timeout(1):
            for _ in range(64):
                if not (await receive()).get("more_body"):
                    return
    except TimeoutError:
        return
