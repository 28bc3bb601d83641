"""How much the service takes before it says no: bodies, requests at once, requests per second."""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dosapp.errors import BusyError
from dosapp.service.settings import ServiceSettings, is_loopback

CALLERS = 10_000  # whose rate is remembered
LOCAL = {"localhost", "127.0.0.1", "::1"}
BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Limits:
    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        # Who decodes for an answer never waits for those who decode lessons or wait for the writer.
        self.decoders = ThreadPoolExecutor(4, "decoder")
        self.lesson_decoders = ThreadPoolExecutor(1, "lesson decoder")
        self.waiters = ThreadPoolExecutor(self.settings.max_pending, "waiter")
        self.going = 0  # requests
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._turn = threading.Lock()
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "dosapp_requests", "by route and status", ["route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "dosapp_request_seconds",
            "from first byte to answer",
            ["route"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._gauges: dict[str, Gauge] = {}

    def close(self) -> None:
        """Threads end with what they are at; nobody asks for what has not begun."""
        for pool in (self.decoders, self.lesson_decoders, self.waiters):
            pool.shutdown(wait=False, cancel_futures=True)

    # Rate: a bucket per caller that fills with the allowed rate and holds two seconds of it

    def check_rate(self, who: str) -> None:
        rate = self.settings.max_rate
        if not rate:
            return
        most, now = max(1.0, 2 * rate), time.monotonic()
        with self._turn:
            left, then = self._buckets.pop(who, (most, now))
            left = min(most, left + (now - then) * rate)
            allowed = left >= 1
            self._buckets[who] = (left - 1 if allowed else left, now)
            while len(self._buckets) > CALLERS:
                self._buckets.popitem(last=False)
        if not allowed:
            raise BusyError(f"more than {rate:g} requests per second; slow down")

    def is_own_page(self, request: Request) -> bool:
        """Without tokens, whoever is on this machine may do everything; another machine may not,
        nor a page of another site that a browser on this machine has open."""
        said, origin = request.headers.get("host", ""), request.headers.get("origin")
        if request.client is None or not is_loopback(request.client.host):
            return False
        try:
            host = urlsplit(f"//{said}").hostname
            return host in LOCAL and (origin is None or urlsplit(origin).netloc == said)
        except ValueError:
            return False

    # Bodies and requests at once, before anything is read

    def middleware(self, app: ASGIApp) -> ASGIApp:
        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
            started, seen, status = time.perf_counter(), 0, 500
            most = self.settings.max_body

            async def counted() -> Message:
                nonlocal seen
                message = await receive()
                seen += len(message.get("body", b""))
                if seen > most:
                    raise _TooMuch
                return message

            async def watched(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            def refuse(code: int, words: str) -> ASGIApp:
                more = {"Retry-After": "1"} if code == 429 else {"Connection": "close"}
                return JSONResponse({"error": words}, code, more)

            self.going += 1
            try:
                length = headers.get("content-length", "0")
                if self.going > self.settings.max_requests:
                    busy = refuse(
                        429, f"{self.settings.max_requests} requests at once are the most"
                    )
                    await busy(scope, receive, watched)
                elif not length.isdigit():
                    await refuse(400, "the content length is not a number")(scope, receive, watched)
                elif int(length) > most:
                    await self._drained(receive)
                    await refuse(413, f"a body has at most {most:,} bytes")(scope, receive, watched)
                else:
                    try:
                        await app(scope, counted, watched)
                    except _TooMuch:
                        words = f"a body has at most {most:,} bytes"
                        await refuse(413, words)(scope, receive, watched)
            finally:
                self.going -= 1
                route = getattr(scope.get("route"), "path", "other")
                self._requests.labels(route, str(status)).inc()
                self._seconds.labels(route).observe(time.perf_counter() - started)

        return limited

    async def _drained(self, receive: Receive) -> None:
        """Read a little of what is refused, so that a polite sender hears why."""
        try:
            async with asyncio.timeout(1):
                for _ in range(64):
                    if not (await receive()).get("more_body"):
                        return
        except TimeoutError:
            return

    def exposition(self, status: Mapping[str, Any]) -> str:
        """Prometheus' text format: requests and latency, and every number of the status."""
        flat = {k: v for k, v in status.items() if isinstance(v, int | float)}
        signals = status.get("signals", {})
        flat |= {k: v for k, v in signals.items() if isinstance(v, int | float)}
        if signals.get("canary"):
            flat["canary_accuracy"] = signals["canary"][-1]["accuracy"]
        flat["frozen"] = bool(status.get("frozen"))
        for name, value in flat.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(f"dosapp_{name}", name, registry=self.registry)
            self._gauges[name].set(float(value))
        return generate_latest(self.registry).decode()


class _TooMuch(Exception):
    """More bytes came than were announced or allowed."""
