"""How long an answer takes while the service learns, and what happens when too much is asked.

Closed loop: clients that ask as fast as they are answered give the capacity without adaptation, and
then run for minutes with it: no errors, bounded memory. Open loop: requests come at a share of that
capacity whether or not the last was answered, with adaptation on and off in turns, on two services
of the same learner; latencies are compared as ratios.
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
    make_small_learner,
    pictures,
    start_service,
)
from dosapp.errors import DosappError
from dosapp.runtime.process_memory import resident_memory
from dosapp.runtime.rng import numpy_rng
from dosapp.service.client import Client, RequestError

FLAGS = ("--skew", "1", "--disagreement", "1", "--adapt-batch", "64", "--interval", "20")
SHARES = (0.05, 0.15, 0.3, 0.6, 0.9)
CLIENTS = 4
TURNS = 4  # of each side at each load
PICTURES = 8  # per request: so that a full load is more than the writer can learn from


@dataclass
class Responses:
    latencies: list[float] = field(default_factory=list)
    busy: int = 0  # 429
    errors: list[str] = field(default_factory=list)

    def add(self, more: "Responses") -> None:
        self.latencies += more.latencies
        self.busy += more.busy
        self.errors += more.errors

    def facts(self) -> dict[str, Any]:
        found = np.array(self.latencies or [np.nan])
        return {
            "answers": len(self.latencies),
            "median": float(np.median(found)),
            "p95": float(np.quantile(found, 0.95)),
            "busy": self.busy,
            "errors": self.errors[:5],
        }


def drill(
    folder: Path,
    seconds: float = 20.0,
    sustained: float = 300.0,
    watch: Callable[[str], None] = lambda words: None,
) -> dict[str, Any]:
    images = pictures(make_small_learner(folder / "off"))
    make_small_learner(folder / "on")
    with (
        start_service(folder / "off", *FLAGS, "--no-adapt") as off,
        start_service(folder / "on", *FLAGS) as on,
    ):
        watch("the capacity without adaptation")
        capacity = len(closed_loop(off, images, seconds).latencies) / seconds
        curve = []
        for share in SHARES:
            heard = {"off": Responses(), "on": Responses()}
            sides = {"off": off, "on": on}
            before = {name: _signals(service) for name, service in sides.items()}
            for turn in range(TURNS):  # what else the machine does then falls on both
                for name in sides if turn % 2 else reversed(sides):
                    watch(f"{share:.0%} of the capacity, adaptation {name}, turn {turn + 1}")
                    heard[name].add(
                        open_loop(sides[name], images, share * capacity, seconds / TURNS, turn)
                    )
                    _rested(sides[name])
            row: dict[str, Any] = {"share": share, "requests_per_second": share * capacity}
            for name, service in sides.items():
                answered = PICTURES * len(heard[name].latencies)
                row[name] = heard[name].facts() | _adapted(service, before[name], answered)
            curve.append(row)
        watch(f"{sustained:.0f} seconds of as much as it takes")
        memory = [resident_memory(on.process.pid)]
        long = Responses()
        end = time.monotonic() + sustained
        while time.monotonic() < end:
            long.add(closed_loop(on, images, min(15.0, sustained)))
            memory.append(resident_memory(on.process.pid))
        ended = on.stop()
    return {
        "capacity": capacity,
        "curve": curve,
        "sustained": long.facts() | {"seconds": sustained, "memory_mb": memory},
        "ended_with": ended,
    }


def closed_loop(service: ServiceProcess, images: list[bytes], seconds: float) -> Responses:
    """Clients that ask again as soon as they are answered."""
    heard, end = Responses(), time.monotonic() + seconds

    def asks(who: int) -> None:
        random = numpy_rng("load", who)
        with service.client() as client:
            while time.monotonic() < end:
                _ask(client, _some(images, random), heard)

    workers = [threading.Thread(target=asks, args=(n,)) for n in range(CLIENTS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return heard


def open_loop(
    service: ServiceProcess, images: list[bytes], rate: float, seconds: float, turn: int = 0
) -> Responses:
    """Requests at random moments, on average `rate` per second, whatever has become of the last."""
    heard, random = Responses(), numpy_rng("open", rate, turn)
    idle: list[Client] = [service.client() for _ in range(64)]

    def asks(pictures: list[bytes], due: float) -> None:
        client = idle.pop()
        try:
            _ask(client, pictures, heard, due)
        finally:
            idle.append(client)

    with ThreadPoolExecutor(len(idle)) as hands:
        due, end = time.perf_counter(), time.perf_counter() + seconds
        while due < end:
            due += float(random.exponential(1 / rate))
            time.sleep(max(0.0, due - time.perf_counter()))
            hands.submit(asks, _some(images, random), due)
    for client in idle:
        client.close()
    return heard


def _some(images: list[bytes], random: np.random.Generator) -> list[bytes]:
    return [images[row] for row in random.integers(len(images), size=PICTURES)]


def _ask(client: Client, pictures: list[bytes], heard: Responses, due: float | None = None) -> None:
    start = time.perf_counter() if due is None else due
    try:
        client.predict(pictures, top=1)
        heard.latencies.append(time.perf_counter() - start)
    except RequestError as error:
        if error.code == 429:
            heard.busy += 1
        else:
            heard.errors.append(str(error))
    except DosappError as error:
        heard.errors.append(str(error))


def _signals(service: ServiceProcess) -> dict[str, Any]:
    with service.client() as client:
        found: dict[str, Any] = client.status()
    return found


def _rested(service: ServiceProcess) -> None:
    """It has learned from what it could: the other's turn must not pay for it."""
    until = time.monotonic() + 10
    while _signals(service).get("stream", 0) >= 64 and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(0.5)


def _adapted(service: ServiceProcess, before: dict[str, Any], answered: int) -> dict[str, Any]:
    """Of the pictures answered, those learned from; what still waits for a full batch counts."""
    now = _signals(service)
    learned = now["signals"]["adapted"] - before["signals"]["adapted"]
    waiting = now["stream"] - before["stream"]
    skipped = now["signals"]["skipped"] - before["signals"]["skipped"]
    return {"adapted": (learned + waiting) / max(1, answered), "skipped": skipped}


def ratios(found: dict[str, Any], share: float = 0.15) -> dict[str, float]:
    row = next(row for row in found["curve"] if row["share"] == share)
    return {
        "median": row["on"]["median"] / row["off"]["median"],
        "p95": row["on"]["p95"] / row["off"]["p95"],
        "adapted": row["on"]["adapted"],
    }
