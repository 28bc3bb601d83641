"""Killed again and again while it answers, adapts and learns.

After every SIGKILL the service is started again on the same folder. Checked: it is ready; every
version that ever answered is still there, so at most the interval that had not become a version is
lost; every lesson that was reported done is still known; and every answer, recomputed from the
version it names, is that version's answer, so none was a mixture.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dosapp.core.chance import chance
from dosapp.drills.served import Served, lesson, pictures, served, small_learner
from dosapp.errors import BadInput
from dosapp.learner import Learner
from dosapp.streams import Stream

FLAGS = ("--adapt-batch", "8", "--interval", "4", "--skew", "1", "--disagreement", "1",
         "--keep", "10000")  # fmt: skip
CLOSE = 1e-3  # scores depend on a batch's company in the last digits


@dataclass
class Seen:
    """What clients were told."""

    answers: dict[tuple[int, int], set[tuple[str, float]]] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)
    lessons: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)  # version, classes
    requests: int = 0
    adapted: int = 0
    errors: list[str] = field(default_factory=list)


def drill(
    folder: Path, kills: int = 50, watch: Callable[[str], None] = lambda words: None
) -> dict[str, Any]:
    stream = small_learner(folder)
    images, seen, random = pictures(stream), Seen(), chance("crash")
    lost: list[str] = []
    for kill in range(kills):
        with served(folder, *FLAGS) as service:
            with service.client() as client:
                head = client.status()["version"]
            if seen.versions and head < max(seen.versions):
                lost.append(f"version {max(seen.versions)} answered, {head} came back")
            _work(service, stream, images, seen, float(random.uniform(0.3, 3.0)), kill)
        watch(f"kill {kill + 1} of {kills}: version {head}, {seen.requests} answers")
    with served(folder, *FLAGS) as service, service.client() as client:
        known = {v["number"]: v for v in client.versions()}
        classes = set(client.classes())
        ended = service.stop()
    for version, names in seen.lessons:
        if version not in known or not set(names) <= classes:
            lost.append(f"the lesson of version {version} is gone")
    mixed = _mixed(folder, images, seen, watch)
    return {
        "kills": kills,
        "answers": seen.requests,
        "versions": max(known),
        "versions_that_answered": len(seen.versions),
        "lessons_acknowledged": len(seen.lessons),
        "lost": lost,
        "mixed": mixed,
        "errors_while_alive": seen.errors,
        "ended_with": ended,
    }


def _work(
    service: Served, stream: Stream, images: list[bytes], seen: Seen, seconds: float, turn: int
) -> None:
    """Two who ask and one who teaches, until the service is killed in the middle of it."""
    killed = threading.Event()

    def asks(who: int) -> None:
        random = chance("asks", who, turn)
        with service.client() as client:
            while not killed.is_set():
                rows = random.integers(0, len(images), 4).tolist()
                try:
                    said = client.predict([images[row] for row in rows], top=1)
                except BadInput as error:
                    if not killed.is_set() and service.process.poll() is None:
                        time.sleep(0.2)  # is it the kill?
                        if not killed.is_set():
                            seen.errors.append(str(error))
                    continue
                seen.versions.add(said["version"])
                seen.requests += 1
                for row, one in zip(rows, said["predictions"], strict=True):
                    kept = seen.answers.setdefault((said["version"], row), set())
                    kept.add((one["label"], one["score"]))

    def teaches() -> None:
        new = stream.tasks[1].classes
        mine = [(turn * 2) % len(new), (turn * 2 + 1) % len(new)]
        data = lesson(stream, 1, mine, 4)
        with service.client() as client:
            try:
                job = client.learn_zip(data)
            except BadInput:
                return
        if job["state"] == "done":
            seen.lessons.append((job["version"], tuple(new[n] for n in mine)))

    workers = [threading.Thread(target=asks, args=(n,)) for n in range(2)]
    workers += [threading.Thread(target=teaches)]
    for worker in workers:
        worker.start()
    time.sleep(seconds)
    killed.set()
    service.kill()
    for worker in workers:
        worker.join()


def _mixed(
    folder: Path, images: list[bytes], seen: Seen, watch: Callable[[str], None]
) -> list[str]:
    """Answers that are not those of the version they name."""
    import io

    import torch
    from PIL import Image

    learner = Learner.opened(folder)
    history = learner.history(folder)
    shown = learner.student.net.picture
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
