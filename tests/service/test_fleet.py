"""One writer and several readers on a Ray cluster, as processes."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from dosapp.drills.service_process import (
    ServiceProcess,
    encode_test_images,
    make_small_learner,
    start_service,
    zip_session,
)
from dosapp.errors import DosappError, InputError
from dosapp.learner.learner import Learner
from dosapp.service.tokens import Tokens
from support.cli import dosapp
from support.services import wait_until

pytest.importorskip("fastapi")
pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:the session has")]
FLAGS = ("--adapt-batch-size", "8", "--interval", "1", "--max-skew", "1", "--max-disagreement", "1")


def actor_pids(pid: int, name: str) -> set[int]:
    """Process ids of a deployment's actors, below the process that started the cluster."""
    parents: dict[int, int] = {}
    named: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(process.name)] = int(
                (process / "stat").read_text().rpartition(")")[2].split()[1]
            )
            if f"ServeReplica:dosapp:{name}".encode() in (process / "cmdline").read_bytes():
                named.add(int(process.name))
        except (OSError, ValueError):
            continue  # it has ended meanwhile

    def is_below(one: int) -> bool:
        while one and one != pid:
            one = parents.get(one, 0)
        return one == pid

    return {one for one in named if is_below(one)}


def check_tokens(folder: Path, fleet: ServiceProcess, images: list[bytes]) -> None:
    """Readers and writer check tokens alike, and a removed one stops working at once."""
    token = Tokens(folder).add("weak", "predict")
    by_reader, by_writer = (lambda c: c.predict(images)), (lambda c: c.status())
    with fleet.client(token) as weak, fleet.client("wrong") as stranger:
        for ask in (by_reader, by_writer):
            ask(weak)
            with pytest.raises(DosappError, match="token"):
                ask(stranger)
        with pytest.raises(DosappError, match="may not"):
            weak.freeze()
        Tokens(folder).remove("weak")
        for ask in (by_reader, by_writer):
            with pytest.raises(DosappError, match="token"):
                ask(weak)


def test_a_fleet_learns_adapts_and_survives_the_end_of_a_reader_and_of_the_writer(tmp_path) -> None:
    folder = tmp_path / "learner"
    scenario = make_small_learner(folder)
    images = encode_test_images(scenario)
    with start_service(folder, *FLAGS, "--replicas", "2") as fleet, fleet.client() as client:
        assert len(actor_pids(fleet.process.pid, "reader")) == 2
        assert len(actor_pids(fleet.process.pid, "writer")) == 1

        check_tokens(folder, fleet, images[:1])

        # Changes are forwarded to the writer by every reader.
        job = client.learn_zip(zip_session(scenario, 1, range(2), 4))
        assert job["state"] == "done", job
        wait_until(lambda: _all_answer_from(job["version"], client, images[:1]))
        assert len(client.classes()) == 12
        with pytest.raises(InputError, match="has no version 99"):
            client.rollback(99)

        # The writer adapts to images that readers have answered.
        wait_until(
            lambda: client.predict(images[:8]) and client.status()["signals"]["adapted"] >= 16
        )
        client.freeze()  # at once; steps that were taken may still become a version before this one
        newest = client.rollback(client.status()["version"])
        wait_until(lambda: _all_answer_from(newest, client, images[:1]))
        expected = client.predict(images[:4])

        # A reader is killed under load: its requests fail, and Ray starts another.
        answers, failures, ended = [], [], threading.Event()

        def send_requests() -> None:
            with fleet.client() as own_client:
                while not ended.is_set():
                    try:
                        answers.append(own_client.predict(images[:4]))
                    except DosappError as error:
                        failures.append(str(error))

        threads = [threading.Thread(target=send_requests) for _ in range(3)]
        for thread in threads:
            thread.start()
        before = actor_pids(fleet.process.pid, "reader")
        os.kill(min(before), signal.SIGKILL)
        wait_until(lambda: len(actor_pids(fleet.process.pid, "reader") - before) == 1)
        time.sleep(1)
        ended.set()
        for thread in threads:
            thread.join()
        assert len(failures) <= len(threads), failures  # at most one request each
        assert len(answers) > 10
        assert all(answer == expected for answer in answers)

        # The writer is killed: readers answer, and the next writer continues from the folder.
        (writer,) = actor_pids(fleet.process.pid, "writer")
        os.kill(writer, signal.SIGKILL)
        assert client.predict(images[:4]) == expected
        wait_until(lambda: actor_pids(fleet.process.pid, "writer") - {writer})
        wait_until(lambda: _frozen(client))
        client.unfreeze()
        assert fleet.stop() == 0
    reasons = [version.reason for version in Learner.open_history(folder).versions()]
    assert sum("on the stream" in reason for reason in reasons) >= 2


def _all_answer_from(version: int, client, images) -> bool:
    """Readers follow one by one, and any may answer: twenty requests reach both."""
    versions = (client.predict(images, learn=False)["version"] for _ in range(20))
    return all(each == version for each in versions)


def _frozen(client) -> bool:
    """Whether the freeze before the crash still holds."""
    try:
        return bool(client.status()["frozen"])
    except DosappError:
        return False


def test_a_fleet_has_its_own_readers(tmp_path) -> None:
    make_small_learner(tmp_path)
    message = dosapp("serve", tmp_path, "--replicas", "2", "--follow", code=2).stderr
    assert "leave out --follow" in message
