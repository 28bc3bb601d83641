"""The service as a process: signals, faults, replicas, its log, and the size of a version."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from dosapp.backbones.pretrained import PretrainedBackbone
from dosapp.data.preprocess import to_bytes
from dosapp.drills.service_process import (
    encode_test_images,
    make_small_learner,
    start_service,
    zip_session,
)
from dosapp.functional.masks import top_fraction
from dosapp.learner.learner import Learner
from dosapp.runtime.files import read_json, write_json
from dosapp.service.client import RequestError
from dosapp.service.service import FOLLOW_INTERVAL, open_service
from dosapp.service.settings import ServiceSettings
from dosapp.settings import LearnerSettings
from dosapp.student.trainable_weights import Selection
from support.services import free_port, wait_until

pytest.importorskip("fastapi")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:the session has")]
QUICK = ("--adapt-batch-size", "8", "--interval", "2", "--max-skew", "1", "--max-disagreement", "1")


@pytest.fixture(scope="module")
def saved_learner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("process") / "learner"
    return folder, make_small_learner(folder)


def test_sigterm_saves_the_steps_on_the_stream(folder, scenario) -> None:
    images = encode_test_images(scenario)
    with start_service(
        folder, "--adapt-batch-size", "8", "--interval", "1000", "--max-skew", "1"
    ) as service:
        with service.client() as client:
            for _ in range(3):
                client.predict(images[:8])
            wait_until(lambda: client.status()["signals"]["adapted"] == 24)
        assert service.stop() == 0
    assert Learner.open_history(folder).versions()[-1].reason == "3 steps on the stream"


def test_sigterm_answers_waiting_requests_and_cancels_a_session(folder, scenario) -> None:
    images, before = encode_test_images(scenario), Learner.load(folder)
    facts = read_json(folder / "learner.json")
    facts["settings"]["epochs"] = 100_000  # a session that would never end
    del facts["sha256"]  # as in files of before 0.3
    write_json(folder / "learner.json", facts)

    def ask(n: int):
        with service.client() as client:
            return client.predict(images[4 * n : 4 * n + 4])

    slow = ("--batch-size", "64", "--batch-wait", "10")  # four requests come within ten seconds
    with start_service(folder, *slow) as service, service.client() as client:
        job = client.learn_zip(zip_session(scenario, 1, range(2), 4), wait=False)
        wait_until(lambda: client.job(job["id"])["step"] > 0)
        with ThreadPoolExecutor(4) as threads:
            answers = [threads.submit(ask, n) for n in range(4)]
            wait_until(lambda: client.status()["waiting"] == 16)
            assert service.stop() == 0
        results = [answer.result() for answer in answers]
    pixels = to_bytes(scenario.tasks[0].test.read(range(4)))
    assert [len(result["predictions"]) for result in results] == [4] * 4
    assert {result["version"] for result in results} == {1}
    after = Learner.load(folder)
    assert Learner.open_history(folder).head == 1
    assert after.classes == before.classes
    assert after.predict(pixels, 3) == before.predict(pixels, 3)


def test_json_lines_on_request(folder, scenario) -> None:
    """Every line after the start is JSON, at the level that was asked for."""
    flags = ("--log-format", "json", "--log-level", "info")
    with start_service(folder, *flags) as service, service.client() as client:
        client.predict(encode_test_images(scenario)[:1])
        assert service.stop() == 0
    lines = (folder / "serve.log").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    # Of the command line: what is served, where, and how it is stopped.
    assert len(lines) - len(records) == 3
    last = records[-1]
    assert (last["path"], last["status"]) == ("/predict", 200)
    assert last["caller"].startswith("drill ")  # the name of its token


def test_a_second_server_on_the_same_folder_is_refused(folder) -> None:
    with start_service(folder):
        command = [sys.executable, "-m", "dosapp", "serve", str(folder), "--port", free_port()]
        second = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert second.returncode == 1
    assert "is being written by another process" in second.stderr.replace("\n", " ")


def test_three_replicas_follow_one_writer(folder, scenario) -> None:
    """Each follows to the new version, gives the writer's predictions, and survives its end.

    A replica polls the folder five times a second. The limit for all three is several times what a
    busy machine needs, and far below what a replica that polls rarely, or not at all, would take.
    """
    assert FOLLOW_INTERVAL <= 0.2
    images = encode_test_images(scenario)[:4]
    with (
        start_service(folder, *QUICK) as writer,
        start_service(folder, "--follow") as one,
        start_service(folder, "--follow") as two,
        start_service(folder, "--follow") as three,
        ThreadPoolExecutor(3) as watchers,
    ):
        clients = [replica.client() for replica in (one, two, three)]
        with writer.client() as client:
            job = client.learn_zip(zip_session(scenario, 1, range(2), 4))
            assert job["state"] == "done", job
            delays = list(watchers.map(partial(_seconds_until, job["version"]), clients))
            answer = client.predict(images, learn=False)
            assert [c.predict(images, learn=False) for c in clients] == [answer] * 3
            with pytest.raises(RequestError, match="only reads"):
                clients[0].freeze()
            writer.kill()  # replicas answer without it
            assert [c.predict(images)["version"] for c in clients] == [job["version"]] * 3
        for c in clients:
            c.close()
    assert max(delays) < 5.0, delays


def _seconds_until(version: int, client) -> float:
    start = time.monotonic()
    wait_until(lambda: client.status()["version"] == version)
    return time.monotonic() - start


class TestFaults:
    def settings(self, **changes) -> ServiceSettings:
        values = {"adapt_batch_size": 8, "interval": 1, "max_skew": 1.0, "threads": 1,
                  "require_canary": False, "canary_share": 0.0, **changes}  # fmt: skip
        settings: ServiceSettings = ServiceSettings.parse(values)
        return settings

    def predict(self, service, pixels) -> int:
        version: int = service.predict(pixels, 1).result(60).version
        return version

    def test_a_full_disk_stops_neither_predictions_nor_the_writer(
        self, folder, scenario, monkeypatch
    ) -> None:
        """The steps are written when there is room again."""
        pixels = to_bytes(scenario.tasks[0].test.read(range(8)))
        write, full = os.fsync, threading.Event()

        def fails(handle: int) -> None:
            if full.is_set():
                raise OSError(errno.ENOSPC, "No space left on device")
            write(handle)

        monkeypatch.setattr(os, "fsync", fails)
        with open_service(folder, self.settings(interval_wait=0.2)) as service:
            full.set()
            assert self.predict(service, pixels) == 1
            wait_until(lambda: "disk" in service.writer.last_error)
            job = service.learn({"owl": pixels[:4], "fox": pixels[4:]}, "me")
            assert job.ended.wait(60)
            assert (job.state, "is full" in job.message) == ("failed", True)
            assert self.predict(service, pixels) == 1
            assert Learner.open_history(folder).head == 1
            full.clear()
            wait_until(lambda: service.version > 1)
            assert service.writer.last_error == ""
        assert Learner.load(folder).digest() == service.writer.learner.digest()
        assert not list(folder.rglob(".*.safetensors.*"))  # nothing half-written

    def test_a_read_only_folder_is_an_error_in_one_sentence(self, folder) -> None:
        command = [sys.executable, "-m", "dosapp", "serve", str(folder), "--port", free_port()]
        folder.chmod(0o555)
        result = subprocess.run(
            [*_unprivileged(), *command], capture_output=True, text=True, timeout=120, check=False
        )
        folder.chmod(0o755)
        assert result.returncode == 1
        message = result.stderr.replace("\n", "")
        assert (
            message == f"dosapp: cannot write '{folder}' (Permission denied); choose another place"
        )

    def test_a_folder_that_can_no_longer_be_written_is_one_sentence(
        self, folder, monkeypatch
    ) -> None:
        import dosapp.runtime.files

        def fail(*_, **__):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(dosapp.runtime.files, "create_file", fail)
        with open_service(folder, self.settings()) as service:
            dark = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
            job = service.learn({"owl": dark, "fox": dark + 99}, "me")
            assert job.ended.wait(60)
            assert job.state == "failed"
            assert "Read-only file system" in job.message
            assert service.version == 1

    def test_the_wall_clock_decides_nothing(self, folder, scenario, monkeypatch) -> None:
        """It goes back an hour with every call; versions keep their order."""
        import datetime as module

        class Backwards(module.datetime):
            hours = 0

            @classmethod
            def now(cls, tz=None):
                cls.hours += 1
                return super().now(tz) - module.timedelta(hours=cls.hours)

        monkeypatch.setattr(module, "datetime", Backwards)
        monkeypatch.setattr(time, "time", lambda: -1.0)
        pixels = to_bytes(scenario.tasks[0].test.read(range(8)))
        with open_service(folder, self.settings()) as service:
            for wanted in (2, 3):
                self.predict(service, pixels)
                wait_until(lambda wanted=wanted: service.version == wanted)
            assert service.rollback(2, "me")[0] == 4
        versions = Learner.open_history(folder).versions()
        assert [v.number for v in versions] == [1, 2, 3, 4]
        assert versions[1].created > versions[3].created


def _unprivileged() -> list[str]:
    """A prefix for commands of root, who can otherwise write into read-only folders."""
    if os.geteuid() != 0:
        return []
    without = ["setpriv", "--bounding-set=-dac_override"]
    if not shutil.which("setpriv") or subprocess.run([*without, "true"], check=False).returncode:
        pytest.skip("root can write everywhere here")
    return without


def test_a_version_of_vit_b_16_is_as_large_as_its_changes(tmp_path) -> None:
    """At most 1.1 × (4 bytes per changed value and a bit per candidate): 60 MB, not 1.2 GB."""
    from dosapp.bench.model import random_clip, vit_b_16

    net = random_clip(vit_b_16())
    original = net.shared_copy(list(net.weights()))
    pretrained = PretrainedBackbone("random", original.fingerprint(), original)
    learner = Learner(LearnerSettings(method="dosapp"), net, pretrained)
    student, method = learner.student, learner.method
    generator = torch.Generator().manual_seed(0)
    scores = {
        n: torch.rand(w.shape, generator=generator) for n, w in net.first_mlp_weights().items()
    }
    mask = top_fraction(scores, 0.1)
    student.select_for_session(Selection(tuple(mask), mask, scores))
    student.assign({n: net.weights()[n] + 1e-3 for n in mask}, mask)
    method.union_scores = {n: scores[n] * mask[n] for n in mask}
    student.ema_update(method.teacher, active_momentum=0.8, frozen_momentum=0.9999)
    state = learner.state()
    history = learner.history(tmp_path)
    history.append(state, learner.working_state(), "the first session")
    size = (tmp_path / "versions" / "000001.safetensors").stat().st_size
    changed = 3 * sum(int(m.sum()) for m in mask.values())  # student, teacher, scores
    candidates = sum(m.numel() for m in mask.values())
    assert candidates == 40_894_464
    assert size <= 1.1 * (4 * changed + candidates / 8)
    assert size < 60e6
    again = learner.history(tmp_path).at(1).tensors
    assert all(torch.equal(again[name], tensor) for name, tensor in state.tensors.items())
