"""Floods of requests against a real service: do honest callers notice?

An honest caller predicts all the time, and an operator asks for `/health` and `/ready` and freezes
and unfreezes. Quiet turns, turns with a flood and turns with a control alternate, so other work on
the machine affects all. In the control the same processes send the flood to a server that refuses
it (`drills/sink.py`): it shows what their own work on the same processors costs. The hostile caller
has a token that may only predict, or none.
"""

import base64
import contextlib
import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from dosapp.drills.floods import FLOODS
from dosapp.drills.service_process import (
    ServiceProcess,
    encode_test_images,
    make_small_learner,
    start_service,
    zip_session,
)
from dosapp.errors import DosappError
from dosapp.runtime.process_memory import resident_memory
from dosapp.scenario import Scenario
from dosapp.service.client import Client
from dosapp.service.tokens import Tokens

SESSION = "running session"
ALL = "all at once"
PAUSE = 0.05  # seconds between two requests of the honest caller
IMAGES = 4  # of an honest request


@dataclass
class Turn:
    """What was seen during some seconds."""

    latencies: list[float] = field(default_factory=list)  # of honest predictions, seconds
    operator: dict[str, float] = field(default_factory=dict)  # longest answer by path
    memory: float = 0.0  # MB at most
    errors: list[str] = field(default_factory=list)
    flood_seconds: float = 0.0  # of processors, taken by the processes that flood

    def extend(self, other: "Turn") -> None:
        """Add another turn of the same kind."""
        self.latencies += other.latencies
        self.errors += other.errors
        self.flood_seconds += other.flood_seconds
        self.memory = max(self.memory, other.memory)
        for path, seconds in other.operator.items():
            self.operator[path] = max(seconds, self.operator.get(path, 0.0))

    def to_json(self) -> dict[str, Any]:
        """Percentiles and counts."""
        latencies = self.latencies or [float("nan")]
        return {
            "answers": len(self.latencies),
            "median": float(np.median(latencies)),
            "p95": float(np.quantile(latencies, 0.95)),
            "operator": self.operator,
            "memory_mb": self.memory,
            "errors": self.errors[:5],
            "error_count": len(self.errors),
            "flood_seconds": self.flood_seconds,
        }


def drill(
    folder: Path,
    seconds: float = 10.0,
    turns: int = 3,
    on_progress: Callable[[str], None] = lambda message: None,
    floods: tuple[str, ...] = (*FLOODS, SESSION, ALL),
) -> dict[str, Any]:
    """Measure what honest callers see, quiet and during each flood.

    Args:
        folder: Where a small learner is created.
        seconds: Of each turn.
        turns: Quiet ones, ones with a flood and ones with its control, of each flood.
        on_progress: Called with a message before each turn.
        floods: Names of the floods.

    Returns:
        The content of `availability.json`.
    """
    scenario = make_small_learner(folder)
    images = encode_test_images(scenario)
    tokens = {name: Tokens(folder).add(name, "predict") for name in ("honest", "hostile")}
    rows = []
    with start_service(folder, "--log-level", "warning") as service, start_sink() as sink:
        measure(service, tokens["honest"], images, max(2.0, seconds / 2))  # everything is loaded
        base = measure(service, tokens["honest"], images, seconds)
        for name in floods:
            seen = {"quiet": Turn(), "flooded": Turn(), "control": Turn()}
            for turn in range(turns):
                on_progress(f"{name}, turn {turn + 1} of {turns}")
                seen["quiet"].extend(measure(service, tokens["honest"], images, seconds))
                for kind, port in (("flooded", service.port), ("control", sink)):
                    before = _ended_processes_seconds()
                    with contextlib.ExitStack() as stack:
                        stack.enter_context(
                            flood(port, name, tokens["hostile"], images[0], seconds + 2)
                        )
                        if kind == "flooded" and name in (SESSION, ALL):
                            stack.enter_context(teach(service, scenario))
                        time.sleep(1)
                        seen[kind].extend(measure(service, tokens["honest"], images, seconds))
                    seen[kind].flood_seconds += _ended_processes_seconds() - before
                    time.sleep(1)
            row: dict[str, Any] = {kind: turn.to_json() for kind, turn in seen.items()}
            flooded = row["flooded"]["p95"]
            ratios = {
                "p95_ratio": flooded / row["quiet"]["p95"],
                "p95_to_control": flooded / row["control"]["p95"],
                "memory_ratio": seen["flooded"].memory / base.memory,
                "slowest_operator": max(seen["flooded"].operator.values(), default=float("nan")),
            }
            rows.append({"flood": name} | row | ratios)
        exit_code = service.stop()
    return {"seconds": seconds, "turns": turns, "base_memory_mb": base.memory, "floods": rows,
            "ended_with": exit_code}  # fmt: skip


def measure(service: ServiceProcess, token: str, images: list[bytes], seconds: float) -> Turn:
    """Predict as an honest caller and operate the service for some seconds."""
    turn, end = Turn(), time.monotonic() + seconds

    def predict() -> None:
        with service.client(token) as client:
            for n in range(100_000):
                if time.monotonic() > end:
                    return
                batch = [images[(IMAGES * n + k) % len(images)] for k in range(IMAGES)]
                started = time.perf_counter()
                try:
                    client.predict(batch, top=1)
                    turn.latencies.append(time.perf_counter() - started)
                except DosappError as error:
                    turn.errors.append(str(error))
                time.sleep(PAUSE)

    def operate() -> None:
        with (
            service.client() as client,
            httpx2.Client(base_url=service.url, timeout=60.0) as probe,
        ):
            for n in range(100_000):
                if time.monotonic() > end:
                    return
                actions = {
                    "/health": lambda: probe.get("/health").raise_for_status(),
                    "/ready": lambda: probe.get("/ready").raise_for_status(),
                    "/freeze": client.freeze if n % 2 == 0 else client.unfreeze,
                }
                for path, action in actions.items():
                    _time_action(turn, path, action)
                turn.memory = max(turn.memory, resident_memory(service.process.pid) or 0.0)
                time.sleep(0.2)
            client.unfreeze()

    threads = [threading.Thread(target=target) for target in (predict, operate)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return turn


def _time_action(turn: Turn, path: str, action: Callable[[], Any]) -> None:
    started = time.perf_counter()
    try:
        action()
    except (DosappError, httpx2.HTTPError) as error:
        turn.errors.append(f"{path}: {error}")
    taken = time.perf_counter() - started
    turn.operator[path] = max(taken, turn.operator.get(path, 0.0))


def _ended_processes_seconds() -> float:
    """Seconds of processors that child processes took; those that still run are not counted."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def start_sink() -> Iterator[int]:
    """Run the server of the control until the end of the block; yields its port."""
    command = [sys.executable, "-m", "dosapp.drills.sink"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def flood(port: int, name: str, token: str, image: bytes, seconds: float) -> Iterator[None]:
    """Run a flood, or all, in processes of their own until the end of the block."""
    given = json.dumps({"token": token, "image": base64.b64encode(image).decode()}).encode()
    processes = []
    for each in (n for n in FLOODS if name in (n, ALL)):
        command = [sys.executable, "-m", "dosapp.drills.floods", each, str(port), str(seconds)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(given)
        process.stdin.close()
        processes.append(process)
    try:
        yield
    finally:
        for process in processes:
            try:
                process.wait(seconds + 20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def teach(service: ServiceProcess, scenario: Scenario) -> Iterator[None]:
    """Send one session after the other until the end of the block."""
    ended = threading.Event()
    teacher = threading.Thread(target=_teach, args=(service.client(), scenario, ended))
    teacher.start()
    try:
        yield
    finally:
        ended.set()
        teacher.join()


def _teach(client: Client, scenario: Scenario, ended: threading.Event) -> None:
    archive = zip_session(scenario, 1, range(10), 16)
    with client:
        while not ended.is_set():
            try:
                client.learn_zip(archive)
            except DosappError:
                time.sleep(0.2)


def format_table(result: dict[str, Any]) -> str:
    """The table of docs/reliability.md."""
    head = ["flood", "p95 ÷ quiet", "p95 ÷ control", "honest errors", "slowest of the operator, s",
            "memory ÷ quiet"]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---|---:|---:|---:|---:|---:|"]
    for row in result["floods"]:
        lines.append(
            f"| {row['flood']} | {row['p95_ratio']:.2f} | {row['p95_to_control']:.2f} | "
            f"{row['flooded']['error_count']} | {row['slowest_operator']:.2f} | "
            f"{row['memory_ratio']:.2f} |"
        )
    return "\n".join(lines) + "\n"
