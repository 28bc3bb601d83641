"""SIGKILL again and again while the service predicts, adapts and learns sessions.

After every kill the service is started again on the same folder. Checked each time: it becomes
ready; its version is not older than any that answered or that a finished session reported; that
session's version is unchanged and its classes are in every version since; and at most one interval
of the stream's reported steps is in no version. After the last kill it must still learn from the
stream. In the end every answer is recomputed from the version it names, so no answer came from a
mixture of versions.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dosapp.data.decoding import open_encoded
from dosapp.drills.service_process import (
    ServiceProcess,
    encode_test_images,
    make_small_learner,
    start_service,
    zip_session,
)
from dosapp.errors import DosappError
from dosapp.history.version import Version
from dosapp.learner.learner import Learner
from dosapp.runtime.rng import numpy_rng
from dosapp.scenario import Scenario

BATCH_SIZE, INTERVAL = 8, 4
FLAGS = ("--adapt-batch-size", str(BATCH_SIZE), "--interval", str(INTERVAL), "--max-skew", "1",
         "--max-disagreement", "1", "--keep-versions", "10000")  # fmt: skip
SESSION_EVERY = 3  # kills; more sessions would leave the writer no time for the stream
TIMEOUT = 300.0  # seconds for an interval of the stream after the last kill
TOLERANCE = 1e-3  # of scores: their last digits depend on the other images of the batch


@dataclass
class Observations:
    """What the service reported to its clients."""

    answers: dict[tuple[int, int], set[tuple[str, float]]] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)  # that answered
    sessions: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)  # version, classes
    requests: int = 0
    first_version: int = 0  # when the service was last started
    adapted: int = 0  # images learned from since then
    errors: list[str] = field(default_factory=list)


def drill(
    folder: Path, kills: int = 50, on_progress: Callable[[str], None] = lambda message: None
) -> dict[str, Any]:
    """Kill a service at random moments and look for what is lost.

    Args:
        folder: Where a small learner is created.
        kills: Number of kills.
        on_progress: Called with a message after every kill.

    Returns:
        The content of `crash.json`; `lost`, `mixed` and `errors_while_alive` should be empty.

    Raises:
        DosappError: If the service no longer learns after the last kill.
    """
    scenario = make_small_learner(folder)
    history = Learner.open_history(folder)
    images, seen, rng = encode_test_images(scenario), Observations(), numpy_rng("crash")
    lost: list[str] = []
    most_unwritten = 0
    for kill in range(kills + 1):
        with start_service(folder, *FLAGS) as service:
            with service.client() as client:
                head = client.status()["version"]
            versions = history.versions()
            lost += find_lost(head, versions, seen)
            most_unwritten = max(most_unwritten, _count_unwritten(versions, seen))
            if kill == kills:
                _wait_for_next_version(service, images, head)
                exit_code = service.stop()
                break
            seen.first_version, seen.adapted = head, 0
            _use_until_killed(service, scenario, images, seen, float(rng.uniform(0.3, 3.0)), kill)
        on_progress(f"kill {kill + 1} of {kills}: version {head}, {seen.requests} answers")
    mixed, versions = find_mixed(folder, images, seen, on_progress), history.versions()
    return {
        "kills": kills,
        "answers": seen.requests,
        "versions": versions[-1].number,
        "versions_that_answered": len(seen.versions),
        "sessions_acknowledged": len(seen.sessions),
        "intervals": sum(_stream_steps(version) > 0 for version in versions),
        "images_adapted": BATCH_SIZE * sum(_stream_steps(version) for version in versions),
        "most_images_lost_by_a_kill": most_unwritten,
        "lost": list(dict.fromkeys(lost)),
        "mixed": mixed,
        "errors_while_alive": seen.errors,
        "ended_with": exit_code,
    }


def _wait_for_next_version(service: ServiceProcess, images: list[bytes], head: int) -> None:
    """Send images until the stream has made another version."""
    end = time.monotonic() + TIMEOUT
    with service.client() as client:
        while client.predict(images[:BATCH_SIZE], top=1)["version"] == head:
            if time.monotonic() > end:
                raise DosappError(
                    f"the stream made no version within {TIMEOUT:.0f} seconds after the last kill"
                )


def find_lost(head: int, versions: Sequence[Version], seen: Observations) -> list[str]:
    """Find what was reported to clients and is missing after a restart.

    Args:
        head: The version after the restart.
        versions: All versions in the folder.
        seen: What was reported before.

    Returns:
        One sentence for every loss.
    """
    lost = []
    newest = max(seen.versions | {version for version, _ in seen.sessions}, default=0)
    if head < newest:
        lost.append(f"version {newest} was reported, {head} came back")
    for number, names in seen.sessions:
        since = [version for version in versions if version.number >= number]
        kept = since and since[0].reason == f"learned {', '.join(names)}"
        if not kept or any(not set(names) <= set(v.facts["classes"]) for v in since):
            lost.append(f"the session of version {number} is lost")
    if _count_unwritten(versions, seen) > BATCH_SIZE * INTERVAL:
        lost.append(f"more than an interval after version {seen.first_version} is lost")
    return lost


def _count_unwritten(versions: Sequence[Version], seen: Observations) -> int:
    """Images learned from before the last kill that are in no version."""
    written = sum(_stream_steps(v) for v in versions if v.number > seen.first_version)
    return max(0, seen.adapted - BATCH_SIZE * written)


def _stream_steps(version: Version) -> int:
    """Steps on the stream in this version. Each used a full batch: a smaller one is used only after
    `adapt_wait` seconds, and no service runs that long here."""
    steps, _, rest = version.reason.partition(" ")
    return int(steps) if rest in ("step on the stream", "steps on the stream") else 0


def _use_until_killed(
    service: ServiceProcess,
    scenario: Scenario,
    images: list[bytes],
    seen: Observations,
    seconds: float,
    turn: int,
) -> None:
    """Kill the service while two clients predict, one reads the status, and at every third turn one
    sends a session."""
    killed = threading.Event()

    def add_error(message: str) -> None:
        if not killed.wait(0.2):  # otherwise the kill was the cause
            seen.errors.append(message)

    def predict(number: int) -> None:
        rng = numpy_rng("asks", number, turn)
        with service.client() as client:
            while not killed.is_set():
                rows = rng.integers(0, len(images), 4).tolist()
                try:
                    answer = client.predict([images[row] for row in rows], top=1)
                except DosappError as error:
                    add_error(str(error))
                    continue
                seen.versions.add(answer["version"])
                seen.requests += 1
                for row, prediction in zip(rows, answer["predictions"], strict=True):
                    answers = seen.answers.setdefault((answer["version"], row), set())
                    answers.add((prediction["label"], prediction["score"]))

    def read_status() -> None:
        with service.client() as client:
            while not killed.wait(0.02):
                try:
                    seen.adapted = client.status()["signals"]["adapted"]
                except DosappError as error:
                    add_error(str(error))

    def send_session() -> None:
        names = scenario.tasks[1].classes
        labels = sorted([turn % len(names), (turn + 1) % len(names)], key=lambda n: names[n])
        data = zip_session(scenario, 1, labels, 4)
        with service.client() as client:
            try:
                job = client.learn_zip(data)
            except DosappError as error:
                add_error(str(error))
                return
        if job["state"] == "done":
            seen.sessions.append((job["version"], tuple(names[n] for n in labels)))
        else:
            add_error(f"a session {job['state']}: {job['said']}")

    threads = [threading.Thread(target=predict, args=(n,)) for n in range(2)]
    threads += [threading.Thread(target=read_status)]
    if turn % SESSION_EVERY == 0:
        threads += [threading.Thread(target=send_session)]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    killed.set()
    service.kill()
    for thread in threads:
        thread.join()


def find_mixed(
    folder: Path, images: list[bytes], seen: Observations, on_progress: Callable[[str], None]
) -> list[str]:
    """Find answers that are not those of the version they name.

    Args:
        folder: Of the learner.
        images: The images that clients sent, as PNG files.
        seen: The answers.
        on_progress: Called with a message before each version.

    Returns:
        One line for every wrong answer.
    """
    learner = Learner.open(folder)
    history = learner.history(folder)
    preprocess = learner.student.backbone.preprocess
    pixels = torch.stack([preprocess(open_encoded(data)) for data in images])
    mixed = []
    for version in sorted(seen.versions):
        on_progress(f"recomputing the answers of version {version}")
        predictions = learner.at(history.at(version), trainable=False).predict(pixels, top=1)
        for row, true in enumerate(predictions):
            for label, score in seen.answers.get((version, row), ()):
                if abs(score - true.score) > TOLERANCE or (
                    label != true.label and true.score > 0.5
                ):
                    mixed.append(f"version {version}, image {row}: {label} {score:.4f}")
    return mixed
