"""Killed again and again while it answers, adapts and learns.

After every SIGKILL the service is started again on the same folder. Settings each time: it is ready;
it stands at or after every version that answered or came of a lesson reported done; that lesson's
version is still what was reported, and its classes are known ever since; and of what the service
said it had learned from the stream, at most one interval has not become a version. After the last
kill it still learns from the stream. In the end every answer, recomputed from the version it names,
is that version's answer, so none was a mixture.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dosapp.drills.service_process import (
    ServiceProcess,
    lesson,
    make_small_learner,
    pictures,
    start_service,
)
from dosapp.errors import DosappError, InputError
from dosapp.history.history import Version
from dosapp.learner.learner import Learner
from dosapp.runtime.rng import numpy_rng
from dosapp.scenario import Scenario

BATCH, INTERVAL = 8, 4
FLAGS = ("--adapt-batch", str(BATCH), "--interval", str(INTERVAL), "--skew", "1",
         "--disagreement", "1", "--keep", "10000")  # fmt: skip
TAUGHT = 3  # one life of so many: a lesson takes the writer's time, and the stream needs it, too
PATIENCE = 300.0  # seconds for an interval of the stream after the last kill
CLOSE = 1e-3  # scores depend on a batch's company in the last digits


@dataclass
class Observations:
    """What clients were told."""

    answers: dict[tuple[int, int], set[tuple[str, float]]] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)
    lessons: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)  # version, classes
    requests: int = 0
    began: int = 0  # the version at the beginning of the last life
    adapted: int = 0  # pictures learned from in it
    errors: list[str] = field(default_factory=list)


def drill(
    folder: Path, kills: int = 50, watch: Callable[[str], None] = lambda words: None
) -> dict[str, Any]:
    stream = make_small_learner(folder)
    history = Learner.open_history(folder)
    images, seen, random = pictures(stream), Observations(), numpy_rng("crash")
    lost: list[str] = []
    unkept = 0
    for life in range(kills + 1):
        with start_service(folder, *FLAGS) as service:
            with service.client() as client:
                head = client.status()["version"]
            versions = history.versions()
            lost += _lost(head, versions, seen)
            unkept = max(unkept, _unkept(versions, seen))
            if life == kills:
                _learns_on(service, images, head)
                ended = service.stop()
                break
            seen.began, seen.adapted = head, 0
            _work(service, stream, images, seen, float(random.uniform(0.3, 3.0)), life)
        watch(f"kill {life + 1} of {kills}: version {head}, {seen.requests} answers")
    mixed, versions = _mixed(folder, images, seen, watch), history.versions()
    return {
        "kills": kills,
        "answers": seen.requests,
        "versions": versions[-1].number,
        "versions_that_answered": len(seen.versions),
        "lessons_acknowledged": len(seen.lessons),
        "intervals": sum(_steps(version) > 0 for version in versions),
        "pictures_adapted": BATCH * sum(_steps(version) for version in versions),
        "most_pictures_unlearned_by_a_kill": unkept,
        "lost": list(dict.fromkeys(lost)),
        "mixed": mixed,
        "errors_while_alive": seen.errors,
        "ended_with": ended,
    }


def _learns_on(service: ServiceProcess, images: list[bytes], head: int) -> None:
    """Asks until the stream has made another version, however busy the machine is."""
    until = time.monotonic() + PATIENCE
    with service.client() as client:
        while client.predict(images[:BATCH], top=1)["version"] == head:
            if time.monotonic() > until:
                raise InputError(
                    f"after the last kill no version came within {PATIENCE:.0f} seconds"
                )


def _lost(head: int, versions: Sequence[Version], seen: Observations) -> list[str]:
    """What clients were told and the service that came back does not know."""
    found = []
    told = max(seen.versions | {version for version, _ in seen.lessons}, default=0)
    if head < told:
        found.append(f"version {told} was told of, {head} came back")
    for number, names in seen.lessons:
        since = [version for version in versions if version.number >= number]
        kept = since and since[0].reason == f"taught {', '.join(names)}"
        if not kept or any(not set(names) <= set(v.facts["classes"]) for v in since):
            found.append(f"the lesson of version {number} is gone")
    if _unkept(versions, seen) > BATCH * INTERVAL:
        found.append(f"more than an interval of the stream after version {seen.began} is gone")
    return found


def _unkept(versions: Sequence[Version], seen: Observations) -> int:
    """Pictures that were learned from in the last life and have not become part of a version."""
    kept = sum(_steps(version) for version in versions if version.number > seen.began)
    return max(0, seen.adapted - BATCH * kept)


def _steps(version: Version) -> int:
    """On the stream, that made this version; each took a whole batch, no life is long enough for
    a smaller one."""
    steps, _, rest = version.reason.partition(" ")
    return int(steps) if rest == "steps on the stream" else 0


def _work(
    service: ServiceProcess,
    stream: Scenario,
    images: list[bytes],
    seen: Observations,
    seconds: float,
    turn: int,
) -> None:
    """Two who ask, one who watches and sometimes one who teaches, until the service is killed in
    the middle of it."""
    killed = threading.Event()

    def failed(why: str) -> None:
        if not killed.wait(0.2):  # else it was the kill
            seen.errors.append(why)

    def asks(who: int) -> None:
        random = numpy_rng("asks", who, turn)
        with service.client() as client:
            while not killed.is_set():
                rows = random.integers(0, len(images), 4).tolist()
                try:
                    said = client.predict([images[row] for row in rows], top=1)
                except DosappError as error:
                    failed(str(error))
                    continue
                seen.versions.add(said["version"])
                seen.requests += 1
                for row, one in zip(rows, said["predictions"], strict=True):
                    kept = seen.answers.setdefault((said["version"], row), set())
                    kept.add((one["label"], one["score"]))

    def watches() -> None:
        with service.client() as client:
            while not killed.wait(0.02):
                try:
                    seen.adapted = client.status()["signals"]["adapted"]
                except DosappError as error:
                    failed(str(error))

    def teaches() -> None:
        new = stream.tasks[1].classes
        mine = sorted([turn % len(new), (turn + 1) % len(new)], key=lambda n: new[n])
        data = lesson(stream, 1, mine, 4)
        with service.client() as client:
            try:
                job = client.learn_zip(data)
            except DosappError as error:
                failed(str(error))
                return
        if job["state"] == "done":
            seen.lessons.append((job["version"], tuple(new[n] for n in mine)))
        else:
            failed(f"a lesson {job['state']}: {job['said']}")

    workers = [threading.Thread(target=asks, args=(n,)) for n in range(2)]
    workers += [threading.Thread(target=watches)]
    if turn % TAUGHT == 0:
        workers += [threading.Thread(target=teaches)]
    for worker in workers:
        worker.start()
    time.sleep(seconds)
    killed.set()
    service.kill()
    for worker in workers:
        worker.join()


def _mixed(
    folder: Path, images: list[bytes], seen: Observations, watch: Callable[[str], None]
) -> list[str]:
    """Answers that are not those of the version they name."""
    import io

    import torch
    from PIL import Image

    learner = Learner.open(folder)
    history = learner.history(folder)
    shown = learner.student.backbone.preprocess
    pixels = torch.stack([shown(Image.open(io.BytesIO(data))) for data in images])
    found = []
    for version in sorted(seen.versions):
        watch(f"recomputing the answers of version {version}")
        truth = learner.at(history.at(version), learns=False).predict(pixels, top=1)
        for row, one in enumerate(truth):
            for label, score in seen.answers.get((version, row), ()):
                if abs(score - one.score) > CLOSE or (label != one.label and one.score > 0.5):
                    found.append(f"version {version}, picture {row}: {label} {score:.4f}")
    return found
