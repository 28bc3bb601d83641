"""Prometheus metrics: requests by route, and every number of the status."""

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)  # seconds


class Metrics:
    """The metrics of one app, in a registry of their own."""

    def __init__(self) -> None:
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

    def observe(self, route: str, status: int, seconds: float) -> None:
        """Count one request."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def to_text(self, status: Mapping[str, Any]) -> str:
        """Write all metrics in Prometheus' text format, with the numbers of a status."""
        values = {k: v for k, v in status.items() if isinstance(v, int | float)}
        signals = status.get("signals", {})
        values |= {k: v for k, v in signals.items() if isinstance(v, int | float)}
        if signals.get("canary"):
            values["canary_accuracy"] = signals["canary"][-1]["accuracy"]
        values["frozen"] = bool(status.get("frozen"))
        values["left_out"] = len(status.get("left_out", ()))
        for name, value in values.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(f"dosapp_{name}", name, registry=self.registry)
            self._gauges[name].set(float(value))
        return generate_latest(self.registry).decode()
