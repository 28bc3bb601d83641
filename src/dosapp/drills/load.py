"""Latency while the service adapts, and behaviour under overload.

Closed loop: clients that send a request as soon as the last was answered give the capacity without
adaptation; then they run for minutes with it, which must give no errors and bounded memory. Open
loop: requests arrive at a share of that capacity at random times. Two services of the same learner,
with and without adaptation, take turns; their latencies are compared as ratios.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dosapp.drills.service_process import (
    ServiceProcess,
    encode_test_images,
    make_small_learner,
    start_service,
)
from dosapp.errors import DosappError
from dosapp.runtime.process_memory import resident_memory
from dosapp.runtime.rng import numpy_rng
from dosapp.service.client import Client, RequestError

ADAPT_BATCH = 64
FLAGS = ("--max-skew", "1", "--max-disagreement", "1", "--adapt-batch-size", str(ADAPT_BATCH),
         "--interval", "20")  # fmt: skip
LOADS = (0.05, 0.15, 0.3, 0.6, 0.9)  # shares of the capacity
CLIENTS = 4
TURNS = 4  # of each service at each load
IMAGES = 8  # per request: at full load more than the writer can learn from


@dataclass
class Responses:
    """Latencies in seconds, and what else came back."""

    latencies: list[float] = field(default_factory=list)
    busy: int = 0  # 429
    errors: list[str] = field(default_factory=list)

    def extend(self, other: "Responses") -> None:
        """Add the responses of another measurement."""
        self.latencies += other.latencies
        self.busy += other.busy
        self.errors += other.errors

    def to_json(self) -> dict[str, Any]:
        """Counts, median and 95th percentile."""
        latencies = np.array(self.latencies or [np.nan])
        return {
            "answers": len(self.latencies),
            "median": float(np.median(latencies)),
            "p95": float(np.quantile(latencies, 0.95)),
            "busy": self.busy,
            "errors": self.errors[:5],
        }


def drill(
    folder: Path,
    seconds: float = 20.0,
    sustained: float = 300.0,
    on_progress: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Measure latency with and without adaptation, then sustained full load.

    Args:
        folder: Where two small learners are created.
        seconds: Of each measurement.
        sustained: Seconds of full load.
        on_progress: Called with a message before each part.

    Returns:
        The content of `load.json` but for `at_15_percent`.
    """
    images = encode_test_images(make_small_learner(folder / "off"))
    make_small_learner(folder / "on")
    with (
        start_service(folder / "off", *FLAGS, "--no-adapt") as off,
        start_service(folder / "on", *FLAGS) as on,
    ):
        on_progress("capacity without adaptation")
        capacity = len(run_closed_loop(off, images, seconds).latencies) / seconds
        curve = []
        services = {"off": off, "on": on}
        for load in LOADS:
            rate, responses = load * capacity, {"off": Responses(), "on": Responses()}
            before = {name: _status(service) for name, service in services.items()}
            for turn in range(TURNS):  # other work on the machine then affects both
                for name in services if turn % 2 else reversed(services):
                    on_progress(f"{load:.0%} of the capacity, adaptation {name}, turn {turn + 1}")
                    responses[name].extend(
                        run_open_loop(services[name], images, rate, seconds / TURNS, turn)
                    )
                    _wait_until_idle(services[name])
            row: dict[str, Any] = {"share": load, "requests_per_second": rate}
            for name, service in services.items():
                answered = IMAGES * len(responses[name].latencies)
                row[name] = responses[name].to_json() | _measure_adapted(
                    service, before[name], answered
                )
            curve.append(row)
        on_progress(f"{sustained:.0f} seconds of full load")
        memory = [resident_memory(on.process.pid)]
        total = Responses()
        end = time.monotonic() + sustained
        while time.monotonic() < end:
            total.extend(run_closed_loop(on, images, min(15.0, sustained)))
            memory.append(resident_memory(on.process.pid))
        exit_code = on.stop()
    return {
        "capacity": capacity,
        "curve": curve,
        "sustained": total.to_json() | {"seconds": sustained, "memory_mb": memory},
        "ended_with": exit_code,
    }


def run_closed_loop(service: ServiceProcess, images: list[bytes], seconds: float) -> Responses:
    """Let clients send a request as soon as their last was answered."""
    responses, end = Responses(), time.monotonic() + seconds

    def send_requests(number: int) -> None:
        rng = numpy_rng("load", number)
        with service.client() as client:
            while time.monotonic() < end:
                _predict(client, _draw(images, rng), responses)

    threads = [threading.Thread(target=send_requests, args=(n,)) for n in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return responses


def run_open_loop(
    service: ServiceProcess, images: list[bytes], rate: float, seconds: float, turn: int = 0
) -> Responses:
    """Send requests at random times, on average `rate` per second, answered or not."""
    responses, rng = Responses(), numpy_rng("open", rate, turn)
    idle: list[Client] = [service.client() for _ in range(64)]

    def send_request(batch: list[bytes], due: float) -> None:
        client = idle.pop()
        try:
            _predict(client, batch, responses, due)
        finally:
            idle.append(client)

    with ThreadPoolExecutor(len(idle)) as pool:
        due, end = time.perf_counter(), time.perf_counter() + seconds
        while due < end:
            due += float(rng.exponential(1 / rate))
            time.sleep(max(0.0, due - time.perf_counter()))
            pool.submit(send_request, _draw(images, rng), due)
    for client in idle:
        client.close()
    return responses


def _draw(images: list[bytes], rng: np.random.Generator) -> list[bytes]:
    return [images[row] for row in rng.integers(len(images), size=IMAGES)]


def _predict(
    client: Client, images: list[bytes], responses: Responses, due: float | None = None
) -> None:
    start = time.perf_counter() if due is None else due
    try:
        client.predict(images, top=1)
        responses.latencies.append(time.perf_counter() - start)
    except RequestError as error:
        if error.code == 429:
            responses.busy += 1
        else:
            responses.errors.append(str(error))
    except DosappError as error:
        responses.errors.append(str(error))


def _status(service: ServiceProcess) -> dict[str, Any]:
    with service.client() as client:
        status: dict[str, Any] = client.status()
    return status


def _wait_until_idle(service: ServiceProcess) -> None:
    """Wait for the waiting stream batches, which would slow down the other service."""
    end = time.monotonic() + 10
    while _status(service).get("stream", 0) >= ADAPT_BATCH and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(0.5)


def _measure_adapted(
    service: ServiceProcess, before: dict[str, Any], answered: int
) -> dict[str, Any]:
    """The share of answered images learned from, with those that wait for a full batch."""
    after = _status(service)
    learned = after["signals"]["adapted"] - before["signals"]["adapted"]
    waiting = after["stream"] - before["stream"]
    skipped = after["signals"]["skipped"] - before["signals"]["skipped"]
    return {"adapted": (learned + waiting) / max(1, answered), "skipped": skipped}


def latency_ratios(result: dict[str, Any], load: float = 0.15) -> dict[str, float]:
    """Latency with ÷ without adaptation at one load, and the share of images learned from."""
    row = next(row for row in result["curve"] if row["share"] == load)
    return {
        "median": row["on"]["median"] / row["off"]["median"],
        "p95": row["on"]["p95"] / row["off"]["p95"],
        "adapted": row["on"]["adapted"],
    }
