"""One writer and several readers on a Ray cluster, as processes."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from dosapp.drills.service_process import lesson, make_small_learner, pictures, start_service
from dosapp.errors import InputError
from dosapp.learner.learner import Learner
from support.cli import dosapp
from support.services import until

pytest.importorskip("fastapi")
pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:the session has")]
FLAGS = ("--adapt-batch", "8", "--interval", "1", "--skew", "1", "--disagreement", "1")


def parts(pid: int, name: str) -> set[int]:
    """Processes of a deployment's actors, below the process that started the cluster."""
    parents: dict[int, int] = {}
    named: set[int] = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(place.name)] = int(
                (place / "stat").read_text().rpartition(")")[2].split()[1]
            )
            if f"ServeReplica:dosapp:{name}".encode() in (place / "cmdline").read_bytes():
                named.add(int(place.name))
        except (OSError, ValueError):
            continue  # it has ended meanwhile

    def is_below(one: int) -> bool:
        while one and one != pid:
            one = parents.get(one, 0)
        return one == pid

    return {one for one in named if is_below(one)}


def test_a_fleet_teaches_adapts_and_outlives_a_reader_and_the_writer(tmp_path) -> None:
    folder = tmp_path / "learner"
    stream = make_small_learner(folder)
    images = pictures(stream)
    with start_service(folder, *FLAGS, "--replicas", "2") as fleet, fleet.client() as client:
        assert len(parts(fleet.process.pid, "reader")) == 2
        assert len(parts(fleet.process.pid, "writer")) == 1

        # What only the writer can do goes to it, whichever reader was asked.
        job = client.learn_zip(lesson(stream, 1, range(2), 4))
        assert job["state"] == "done", job
        until(lambda: _all_answer_from(job["version"], client, images[:1]))
        assert len(client.classes()) == 12
        with pytest.raises(InputError, match="has no version 99"):
            client.rollback(99)

        # Pictures that readers have answered are learned from by the writer.
        until(lambda: client.predict(images[:8]) and client.status()["signals"]["adapted"] >= 16)
        client.freeze()
        newest = client.status()["version"]
        until(lambda: _all_answer_from(newest, client, images[:1]))
        said = client.predict(images[:4])

        # A reader is killed while clients ask. Whoever asked it hears of it; Ray starts another.
        answers, failures, ended = [], [], threading.Event()

        def asks() -> None:
            with fleet.client() as mine:
                while not ended.is_set():
                    try:
                        answers.append(mine.predict(images[:4]))
                    except InputError as error:
                        failures.append(str(error))

        asking = [threading.Thread(target=asks) for _ in range(3)]
        for one in asking:
            one.start()
        before = parts(fleet.process.pid, "reader")
        os.kill(min(before), signal.SIGKILL)
        until(lambda: len(parts(fleet.process.pid, "reader") - before) == 1)
        time.sleep(1)
        ended.set()
        for one in asking:
            one.join()
        assert len(failures) <= len(asking), failures  # at most what each had on its way
        assert len(answers) > 10
        assert all(one == said for one in answers)

        # The writer is killed: readers answer, and another one goes on from the folder.
        (writer,) = parts(fleet.process.pid, "writer")
        os.kill(writer, signal.SIGKILL)
        assert client.predict(images[:4]) == said
        until(lambda: parts(fleet.process.pid, "writer") - {writer})
        until(lambda: _frozen(client))
        client.unfreeze()
        assert fleet.stop() == 0
    reasons = [version.reason for version in Learner.open_history(folder).versions()]
    assert sum("on the stream" in reason for reason in reasons) >= 2


def _all_answer_from(version: int, client, images) -> bool:
    """Readers follow one by one, and anyone may be asked: so many times that each of two was."""
    said = (client.predict(images, learn=False)["version"] for _ in range(20))
    return all(one == version for one in said)


def _frozen(client) -> bool:
    """What was ordered before the crash holds after it."""
    try:
        return bool(client.status()["frozen"])
    except InputError:
        return False


def test_a_fleet_has_its_own_readers(tmp_path) -> None:
    make_small_learner(tmp_path)
    said = dosapp("serve", tmp_path, "--replicas", "2", "--follow", code=2).stderr
    assert "leave out --follow" in said
