"""The service: predictions, the stream, sessions, versions, guards, access and replicas."""

import base64
import contextlib
import errno
import functools
import gc
import io
import itertools
import json
import os
import re
import shutil
import sys
import threading
import time
import weakref
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import dosapp.backbones.pretrained
from dosapp.data.preprocess import to_float
from dosapp.drills.service_process import encode_png, encode_test_images, zip_session
from dosapp.errors import (
    BusyError,
    CorruptRecordError,
    InputError,
    ReadOnlyError,
    UnavailableError,
)
from dosapp.learner.canary import Canary, CanaryGaps
from dosapp.learner.learner import Learner
from dosapp.runtime.files import write_bytes
from dosapp.service.service import open_service
from dosapp.service.settings import ServiceSettings
from dosapp.service.tokens import Tokens
from dosapp.service.writer import WRITER_ENDED
from dosapp.settings import LearnerSettings

pytest.importorskip("fastapi")
from starlette.testclient import TestClient

from dosapp.service.http.app import build_app
from support.services import block_writer, save_trained_learner, wait_until

QUICK = {"adapt_batch_size": 8, "interval": 2, "threads": 1, "batch_wait": 0.0,
         "token": False, "require_canary": False, "canary_share": 0.0}  # fmt: skip


def served(folder: Path, **changes: object):
    canary = None if isinstance(changes.get("canary"), Path) else changes.pop("canary", None)
    settings: ServiceSettings = ServiceSettings.parse({**QUICK, **changes})
    return open_service(folder, settings, canary=canary)


def images_of(scenario, task: int = 0, count: int = 8) -> list[bytes]:
    return encode_test_images(scenario, task)[:count]


def connect(app) -> TestClient:
    return TestClient(app, "http://127.0.0.1", client=("127.0.0.1", 1))


def second_task_zip(scenario) -> bytes:
    """All training images of the second task."""
    return zip_session(scenario, 1, range(3), 8)


def max_confidences(learner: Learner, images: list[bytes]) -> list[float]:
    """The highest probability that any expert gives to each image."""
    pixels = to_float(
        torch.stack([learner.preprocess(Image.open(io.BytesIO(data))) for data in images])
    )
    experts = learner.method.experts(learner.student).values()
    logits = torch.stack(
        [expert.logit_scale * learner.score_images(pixels, expert) for expert in experts]
    )
    confidences: list[float] = logits.softmax(dim=2).amax(dim=(0, 2)).tolist()
    return confidences


def post_session(client: TestClient, scenario):
    return client.post("/learn", files={"archive": second_task_zip(scenario)})


def files(images: list[bytes]):
    return [("images", (f"{n}.png", data)) for n, data in enumerate(images)]


def finished(client, answer) -> dict:
    assert answer.status_code == 202, answer.text
    job = answer.json()
    wait_until(
        lambda: client.get(f"/jobs/{job['id']}").json()["state"] not in ("waiting", "learning")
    )
    return client.get(f"/jobs/{job['id']}").json()


class TestPredict:
    def test_every_encoding_of_an_image_gives_the_same_prediction(self, folder, scenario) -> None:
        images = images_of(scenario, count=2)
        with served(folder, adapt=False) as service, connect(build_app(service)) as client:
            form = client.post("/predict?top=2", files=files(images)).json()
            encoded = {"images": [base64.b64encode(data).decode() for data in images]}
            raw = np.stack([
                np.array(Image.open(io.BytesIO(data))).transpose(2, 0, 1) for data in images
            ])  # fmt: skip
            more = {"shape": "2,3,32,32", "top": 2}
            kind = {"Content-Type": "application/octet-stream"}
            floats = (raw / np.float32(255)).astype("<f4").tobytes()
            others = [
                client.post("/predict?top=2", json=encoded),
                client.post("/predict", params=more, content=raw.tobytes(), headers=kind),
                client.post("/predict", params={**more, "dtype": "float32"}, content=floats,
                            headers=kind),
            ]  # fmt: skip
            assert [other.json() for other in others] == [form] * 3
            one = client.post("/predict?top=2", content=images[0],
                              headers={"Content-Type": "image/png"})  # fmt: skip
            assert one.json()["predictions"][0]["label"] == form["predictions"][0]["label"]
        learner = Learner.load(folder)
        said = learner.predict(torch.from_numpy(raw), top=2)
        assert form["version"] == 1
        for ours, theirs in zip(said, form["predictions"], strict=True):
            assert ours.label == theirs["label"]
            assert len(theirs["top"]) == 2
            assert ours.score == pytest.approx(theirs["score"], abs=1e-5)

    def test_a_score_below_the_threshold_is_unknown(self, folder, scenario) -> None:
        with (
            served(folder, unknown_threshold=1.0) as service,
            connect(build_app(service)) as client,
        ):
            answer = client.post("/predict", files=files(images_of(scenario, 1))).json()
        unsure = [p for p in answer["predictions"] if p["score"] < 1]
        assert unsure
        assert all(p["label"] == "unknown" and not p["known"] and p["top"] for p in unsure)

    def test_concurrent_requests_are_answered_in_one_batch(
        self, folder, scenario, monkeypatch
    ) -> None:
        """Each gets its own predictions, with as many classes as it wants."""
        pixels = scenario.tasks[0].test.read(range(3))
        sizes, predict = [], Learner.predict

        def watched(learner, images, top=5):
            sizes.append(len(images))
            return predict(learner, images, top)

        with served(folder, batch_size=3, batch_wait=60.0, adapt=False) as service:
            alone = [predict(service.reader.published.learner, p[None], 3)[0] for p in pixels]
            monkeypatch.setattr(Learner, "predict", watched)
            one, two = service.predict(pixels[:2], 1), service.predict(pixels[2:], 3)
            found = one.result(30).predictions + two.result(30).predictions
        assert sizes == [3]
        assert [p.label for p in found] == [p.label for p in alone]
        assert [p.score for p in found] == pytest.approx([p.score for p in alone], abs=1e-5)
        assert [len(p.top) for p in found] == [1, 1, 3]

    def test_too_many_images_in_a_request(self, folder, scenario) -> None:
        images = images_of(scenario, count=3)
        encoded = {"images": [base64.b64encode(data).decode() for data in images]}
        raw = {"content": bytes(3 * 3 * 32 * 32), "params": {"shape": "3,3,32,32"},
               "headers": {"Content-Type": "application/octet-stream"}}  # fmt: skip
        with (
            served(folder, max_images=2, max_body=1_000_000) as service,
            connect(build_app(service)) as client,
        ):
            limits = ("more than 2 files, which is the limit", *2 * ("at most 2 are accepted",))
            for body, limit in zip(
                ({"files": files(images)}, {"json": encoded}, raw), limits, strict=True
            ):
                answer = client.post("/predict", **body)
                assert answer.status_code == 413
                assert limit in answer.json()["error"]
            assert client.post("/predict", files=files(images[:2])).status_code == 200

    def test_a_body_of_unknown_length_is_limited(self, folder) -> None:
        """Chunks have no content length: their bytes are counted."""

        def chunks():
            for _ in range(100):
                yield bytes(1000)

        head = {"Content-Type": "image/png"}
        with served(folder, max_body=10_000) as service, connect(build_app(service)) as client:
            answer = client.post("/predict", content=chunks(), headers=head)
            assert "content-length" not in answer.request.headers
            assert (answer.status_code, answer.json()["error"]) == (
                413, "a body has at most 10,000 bytes")  # fmt: skip
            told = client.post("/predict", content=bytes(10_001), headers=head)
            assert told.status_code == 413

    def test_too_many_concurrent_requests(self, folder, monkeypatch) -> None:
        begun, go, codes = threading.Semaphore(0), threading.Event(), []

        def slow(number: int, who: str) -> tuple[int, str]:
            begun.release()
            go.wait(60)
            return number, ""

        with (
            served(folder, max_caller_requests=2) as service,
            connect(build_app(service)) as client,
        ):
            monkeypatch.setattr(service, "rollback", slow)

            def order() -> None:
                codes.append(client.post("/rollback", json={"version": 1}).status_code)

            going = [threading.Thread(target=order) for _ in range(2)]
            for one in going:
                one.start()
                assert begun.acquire(timeout=60)
            refused = client.get("/classes")
            alive = [client.get(path).status_code for path in ("/health", "/ready")]
            frozen = client.post("/freeze").status_code
            go.set()
            for one in going:
                one.join()
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json() == {
                "error": "2 requests of one caller at once are the limit",
                "request_id": refused.headers["x-request-id"],
            }
            assert codes == [200, 200]
            assert [*alive, frozen] == [200, 200, 200]
            assert client.get("/classes").status_code == 200

    def test_a_full_queue_answers_429_at_once(self, folder, scenario) -> None:
        with served(folder, max_queue=4) as service:
            pixels = torch.zeros(3, 3, 32, 32, dtype=torch.uint8)
            service.reader.waiting = 2  # as if two waited
            with pytest.raises(BusyError, match="2 images wait"):
                service.reader.submit(pixels)
            client = connect(build_app(service))
            answer = client.post("/predict", files=files(images_of(scenario, count=3)))
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            service.reader.waiting = 0

    def test_threads_end_with_the_service(self, folder, scenario) -> None:
        before = set(threading.enumerate())
        with served(folder) as service:
            client = connect(build_app(service))  # no lifespan event ends the app
            client.post("/predict", files=files(images_of(scenario)))
            client.post("/learn", files={"archive": b""})
            client.get("/versions")
            names = {re.sub(r"_\d+$", "", t.name) for t in set(threading.enumerate()) - before}
            assert names >= {"reader", "writer", "decoder", "session decoder", "history reader"}
        wait_until(lambda: not set(threading.enumerate()) - before)

    def test_too_many_requests_of_one_caller(self, folder) -> None:
        with served(folder, max_rate=2.0) as service:
            client = connect(build_app(service))
            codes = [client.get("/classes").status_code for _ in range(20)]
        assert codes[0] == 200
        assert 429 in codes

    def test_metrics_are_prometheus_text(self, folder, scenario) -> None:
        with served(folder) as service, connect(build_app(service)) as client:
            client.post("/predict", files=files(images_of(scenario)))
            text = client.get("/metrics").text
        assert 'dosapp_requests_total{route="/predict",status="200"} 1.0' in text
        assert "dosapp_answered 8.0" in text
        assert "dosapp_version 1.0" in text


class TestStream:
    def test_images_are_used_once_and_become_a_version(self, folder, scenario) -> None:
        before = Learner.load(folder)
        with served(folder) as service, connect(build_app(service)) as client:
            for _ in range(2):
                client.post("/predict", files=files(images_of(scenario)))
            wait_until(lambda: client.get("/ready").json()["version"] > 1)
            versions = client.get("/versions").json()
            signals = client.get("/status").json()["signals"]
        assert [v["reason"] for v in versions] == ["trained for the tests", "2 steps on the stream"]
        assert signals["adapted"] == 16
        assert sum(signals["histogram"].values()) == 16
        assert signals["drift"] > 0
        with served(folder) as service:  # counts from the last session, not from the restart
            assert service.status()["signals"]["drift"] == pytest.approx(signals["drift"])
        after = Learner.load(folder)
        assert after.digest() != before.digest()
        pixels = torch.stack([before.student.backbone.preprocess(Image.open(io.BytesIO(p)))
                              for p in images_of(scenario)])  # fmt: skip
        for _ in range(2):  # the same two steps, in process
            before.adapt(pixels)
        assert before.digest() == after.digest()

    @pytest.mark.parametrize("adapt", ["rmt", "psmt", "dss-style"])
    def test_an_ensemble_drifts_with_its_student(self, tiny, tmp_path, adapt) -> None:
        scenario = save_trained_learner(tiny, tmp_path / "x", method="spu", adapt=adapt)
        unsure = files(images_of(scenario, 1))  # of what is sure dss-style learns nothing
        with served(tmp_path / "x", interval=1, max_disagreement=1.0, max_skew=1.0) as service:
            connect(build_app(service)).post("/predict", files=unsure)
            wait_until(lambda: service.version > 1)
            drift = service.history.version(2).seen["drift"]
            moved = service.history.diff(1, 2)
        far = [m.distance for m in moved if m.name.startswith("student/")]
        assert drift == pytest.approx(sum(d**2 for d in far) ** 0.5, rel=1e-4)
        assert drift > 0

    def test_images_below_the_confidence_gate_are_held_back(self, folder, scenario) -> None:
        """Of eight images none, one or five pass; one is not enough for a step."""
        images = images_of(scenario, 1, 48)
        sure = max_confidences(Learner.load(folder), images)
        order = sorted(range(len(images)), key=sure.__getitem__)[:9]
        images, sure = [images[n] for n in order[:8]], [sure[n] for n in order]
        free = {"max_skew": 1.0, "max_disagreement": 1.0, "interval": 1}
        for passed, learned in ((0, 0), (1, 0), (5, 5)):
            gate = (sure[7 - passed] + sure[8 - passed]) / 2
            here = Path(shutil.copytree(folder, folder.parent / str(passed)))
            with served(here, confidence_gate=gate, **free) as service:
                connect(build_app(service)).post("/predict", files=files(images))
                signals = service.writer.signals
                wait_until(lambda signals=signals: signals.held)
            assert (signals.adapted, signals.held) == (learned, 8 - learned)
            assert len(signals.disagreement) == (learned > 0)
            reasons = [v.reason for v in Learner.open_history(here).versions()][1:]
            assert reasons == ["1 step on the stream"] * (learned > 0)

    def test_a_skewed_stream_changes_skew_aware_teachers_less(self, folder, scenario) -> None:
        images = images_of(scenario, count=1) * 6 + images_of(scenario, count=2)
        far = {}
        for aware in (True, False):
            here = Path(shutil.copytree(folder, folder.parent / str(aware)))
            with served(here, skew_aware_ema=aware, max_skew=1.0, interval=1) as service:
                connect(build_app(service)).post("/predict", files=files(images))
                wait_until(lambda service=service: service.version > 1)
                assert service.writer.signals.adapted == 8
            moved = Learner.open_history(here).diff(1, 2)
            far[aware] = sum(m.distance for m in moved if m.name.startswith("teacher/"))
        assert 0 < far[True] < far[False]

    def test_images_with_learn_false_do_not_join_the_stream(self, folder, scenario) -> None:
        with served(folder) as service, connect(build_app(service)) as client:
            for _ in range(3):
                client.post("/predict?learn=false", files=files(images_of(scenario)))
            assert service.writer.waiting == 0
        assert Learner.open_history(folder).head == 1

    def test_images_of_a_cancelled_request_do_not_join_the_stream(self, folder, scenario) -> None:
        pixels = scenario.tasks[0].test.read(range(4))
        with served(folder, batch_size=4, batch_wait=60.0) as service:
            cancelled = service.predict(pixels[:2])
            assert cancelled.cancel()
            assert len(service.predict(pixels[2:]).result(30).predictions) == 2
            assert (service.answered, service.writer.waiting) == (2, 2)

    def test_steps_of_an_unfinished_interval_are_saved_at_the_end(self, folder, scenario) -> None:
        with served(folder, interval=100) as service, connect(build_app(service)) as client:
            client.post("/predict", files=files(images_of(scenario)))
            wait_until(lambda: service.writer.signals.adapted == 8)
        assert [v.reason for v in Learner.open_history(folder).versions()][1:] == [
            "1 step on the stream"
        ]

    def test_statistics_that_the_stream_moves_are_published(self, tiny, tmp_path) -> None:
        """SPU takes no step on the stream; its head changes all the same."""
        scenario = save_trained_learner(tiny, tmp_path / "x", method="spu", head="gda-moved")
        before = Learner.load(tmp_path / "x")
        before.learn(scenario.session(1))  # moves the features of the first
        before.save(tmp_path / "x")
        guards = {"max_skew": 1.0, "max_disagreement": 1.0}
        with served(tmp_path / "x", interval=1, **guards) as service:
            client = connect(build_app(service))
            assert client.get("/status").json()["adapts"]
            client.post("/predict", files=files(images_of(scenario)))
            wait_until(lambda: service.version > 2)
        assert Learner.load(tmp_path / "x").digest() != before.digest()

    def test_a_smaller_batch_is_used_after_adapt_wait(self, folder, scenario) -> None:
        with served(folder, adapt_wait=0.05, interval=1) as service:
            client = connect(build_app(service))
            client.post("/predict", files=files(images_of(scenario, count=3)))
            wait_until(lambda: service.version > 1)
            assert service.writer.signals.adapted == 3

    def test_the_stream_waits_while_requests_wait(self, folder, scenario) -> None:
        pixels = scenario.tasks[0].test.read(range(8))
        with served(folder, batch_size=4, max_skew=1.0) as service:
            service.reader.waiting = 5  # as if one more waited than the next batch takes
            service.offer(pixels, service.reader.published.learner.predict(pixels, 1))
            time.sleep(0.3)  # the writer checks many times
            assert (service.writer.waiting, service.writer.signals.adapted) == (8, 0)
            service.reader.waiting = 0
            wait_until(lambda: service.writer.signals.adapted == 8)

    def test_images_are_never_written_to_a_disk(self, folder) -> None:
        """While images large enough for a temporary file come, are corrected, learned from and
        go, Python opens nothing for writing but the learner's own records, and none of these holds
        an image: as it was sent, or as pixels. (What C code opens by itself is not seen.)"""
        large = noise(1200, "BMP")  # 4 MB: beyond what forms usually keep in memory
        small = noise(32, "PNG")
        with written() as paths, served(folder, max_skew=1.0, max_disagreement=1.0) as service:
            client = connect(build_app(service))
            for _ in range(8):
                sent = files([large, small])
                assert client.post("/predict", files=sent).status_code == 200
            for data in (large, small):
                body = {"image": base64.b64encode(data).decode(), "label": "owl", "new_class": True}
                assert client.post("/correct", json=body).status_code == 200
            wait_until(lambda: service.version > 1)
            decoded = [service.uploads.decode_image(data) for data in (large, small)]
        kinds = {re.sub(r"\d{6}", "N", str(Path(p).relative_to(folder))) for p in paths}
        stems = {re.sub(r"(/|^)\.(.*safetensors)\..*", r"\1\2", kind) for kind in kinds}
        assert stems == {".lock", "audit.jsonl", "working.safetensors", "versions/N.safetensors"}
        needles = [data[2000:2064] for data in (large, small)]  # noise is nowhere by chance
        for image in decoded:
            row = image[:, 16].contiguous()
            needles += [row.numpy().tobytes()[:64], (row / 255).numpy().tobytes()[:64]]
        assert all(len(set(needle)) > 2 for needle in needles)
        for path in folder.rglob("*"):
            if path.is_file():
                assert not [needle for needle in needles if needle in path.read_bytes()], path

    def test_a_method_that_stores_images_is_refused(
        self, learner_settings, tiny, scenario, tmp_path
    ) -> None:
        learner = Learner(learner_settings(method="spu", adapt="note"), tiny)
        learner.learn(scenario.session(0))
        learner.save(tmp_path / "x")
        with (
            pytest.raises(InputError, match="stores images of the stream"),
            served(tmp_path / "x"),
        ):
            pass


class TestFullDisk:
    @pytest.fixture
    def full(self, monkeypatch) -> threading.Event:
        """While it is set, nothing can be written."""
        write, full = os.fsync, threading.Event()

        def fails(handle: int) -> None:
            if full.is_set():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(handle)

        monkeypatch.setattr(os, "fsync", fails)
        return full

    def test_it_freezes_at_once_and_saves_that_when_there_is_room(
        self, folder, scenario, full
    ) -> None:
        with (
            served(folder, interval_wait=0.2) as service,
            connect(build_app(service)) as client,
        ):
            full.set()
            said = client.post("/freeze").json()
            assert said["frozen"]
            assert "a restart would not know that: the disk" in said["trouble"]
            status = client.get("/status").json()
            assert (status["frozen"], status["trouble"]) == ("frozen by localhost", said["trouble"])
            client.post("/predict", files=files(images_of(scenario)))
            assert service.writer.waiting == 0
            shutil.copytree(folder, folder.parent / "killed")
            full.clear()
            wait_until(lambda: client.get("/status").json()["trouble"] == "")
        for place, frozen in ((folder.parent / "killed", ""), (folder, "frozen by localhost")):
            with served(place) as service:
                assert service.writer.frozen == frozen

    def test_a_corrupt_record_leaves_the_writer_in_order(
        self, folder, scenario, monkeypatch
    ) -> None:
        """Version 0.1 treated it like a full disk; so must a writer whose error kinds differ."""
        with served(folder, interval=1) as service, connect(build_app(service)) as client:

            def fail(*args: object) -> int:
                raise CorruptRecordError("the head is torn")

            monkeypatch.setattr(service.history, "append", fail)
            client.post("/predict", files=files(images_of(scenario)))
            wait_until(lambda: "the head is torn" in service.writer.last_error)
            assert client.post("/freeze").status_code == 200
            assert service.is_ready
            monkeypatch.undo()

    @pytest.mark.parametrize("then", ["a session", "a cancelled session", "a rename", "an error"])
    def test_checked_steps_survive_a_failing_command(
        self, folder, scenario, full, then, monkeypatch
    ) -> None:
        """Steps that passed the guard are in the next version, even if the disk was full and a
        command failed meanwhile."""
        alone = Learner.load(folder)
        pixels = torch.stack([alone.student.backbone.preprocess(Image.open(io.BytesIO(p)))
                              for p in images_of(scenario)])  # fmt: skip
        with served(folder, interval=1) as service, connect(build_app(service)) as client:
            full.set()
            for done in (8, 16):
                client.post("/predict", files=files(images_of(scenario)))
                wait_until(lambda done=done: service.writer.signals.adapted == done)
            wait_until(lambda: "is full" in service.writer.last_error)
            if then == "a rename":
                body = {"name": alone.classes[0], "to": "owl"}
                assert client.post("/classes/rename", json=body).status_code == 507
            elif then == "an error":
                with pytest.raises(ZeroDivisionError):
                    service.writer.submit(lambda: 1 / 0).result()
            else:
                release = block_writer(service)
                job = post_session(client, scenario).json()
                if then == "a cancelled session":
                    client.post(f"/jobs/{job['id']}/cancel")
                release.set()
                assert service.job(job["id"]).ended.wait(60)
                assert service.job(job["id"]).state in ("failed", "cancelled")
            assert service.version == 1
            full.clear()
        versions = Learner.open_history(folder).versions()
        assert [v.reason for v in versions][1:] == ["2 steps on the stream"]
        for _ in range(2):
            alone.adapt(pixels)
        assert Learner.load(folder).digest() == alone.digest()


def noise(size: int, kind: str) -> bytes:
    values = np.random.default_rng(size).integers(0, 255, (size, size, 3), dtype=np.uint8)
    with io.BytesIO() as buffer:
        Image.fromarray(values).save(buffer, kind)
        return buffer.getvalue()


_watchers: list[list[str]] = []


def _hear(event: str, args: tuple) -> None:
    if not _watchers or event != "open" or isinstance(args[0], int):  # a handle has had its name
        return
    if (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        _watchers[-1].append(os.path.abspath(os.fsdecode(args[0])))


@functools.cache
def _listening() -> None:
    sys.addaudithook(_hear)  # for good: Python takes none back


@contextlib.contextmanager
def written() -> Iterator[list[str]]:
    """Every path that Python code of this process opens for writing in here."""
    _listening()
    _watchers.append([])
    try:
        yield _watchers[-1]
    finally:
        _watchers.pop()


class TestProcessMemory:
    @pytest.mark.parametrize("follow", [False, True])
    def test_the_backbone_is_loaded_once(self, folder, monkeypatch, follow) -> None:
        read, load = [], dosapp.backbones.pretrained.load_backbone
        monkeypatch.setattr(
            dosapp.backbones.pretrained, "load_backbone", lambda n: read.append(n) or load(n)
        )
        with open_service(folder, ServiceSettings(), follow=follow) as service:
            learner = service.reader.published.learner
            mine, theirs = learner.pretrained.weights(), learner.student.backbone.weights()
            assert any(mine[n] is theirs[n] for n in mine)
        assert read == ["tiny"]

    def test_a_refused_learner_is_freed(self, folder, scenario, falling_canary) -> None:
        """Nothing else refers to the learner of the writer."""
        with served(folder, canary=falling_canary, interval=1) as service:
            first = weakref.ref(service.writer.learner.student.backbone)
            connect(build_app(service)).post("/predict", files=files(images_of(scenario)))
            wait_until(lambda: service.writer.signals.refused)
            gc.collect()
            assert first() is None


class TestSessions:
    def test_a_zip_of_new_classes(self, folder, scenario) -> None:
        new = list(scenario.tasks[1].classes)
        with served(folder) as service, connect(build_app(service)) as client:
            job = finished(client, post_session(client, scenario))
            assert job["state"] == "done", job
            assert (job["version"], job["images"], job["step"]) == (2, 24, job["of"])
            assert client.get("/classes").json()["classes"][3:] == sorted(new)
            answer = client.post("/predict", files=files(images_of(scenario, 1))).json()
            assert answer["version"] == 2
            assert {p["label"] for p in answer["predictions"]} & set(new)
            entries = client.get("/audit").json()
        assert [(d["what"], d["who"], d["version"]) for d in entries] == [
            ("taught", "localhost", 2)
        ]
        again = Learner.load(folder)
        assert again.classes[3:] == sorted(new)
        assert again.sessions == 2

    @pytest.mark.filterwarnings("ignore:the session has")
    def test_images_of_one_class_with_a_name(self, folder, scenario) -> None:
        name, images = scenario.tasks[1].classes[0], images_of(scenario, 1, 5)
        with served(folder) as service, connect(build_app(service)) as client:
            job = finished(client, client.post("/learn", data={"name": name}, files=files(images)))
            assert job["state"] == "done", job
            assert client.get("/classes").json()["classes"][-1] == name

    def test_a_first_session_of_one_class_is_refused(self, tmp_path, scenario) -> None:
        Learner(LearnerSettings(method="dosapp")).save(tmp_path / "new")
        image = images_of(scenario, count=1)[0]
        body = {"image": base64.b64encode(image).decode(), "label": "fox", "new_class": True}
        with served(tmp_path / "new") as service, connect(build_app(service)) as client:
            client.post("/correct", json=body)
            answer = client.post("/learn", json={})
            assert (answer.status_code, "at least two classes" in answer.text) == (400, True)
            assert client.get("/status").json()["corrections"] == 1  # kept
            assert len(client.get("/versions").json()) == 1

    def test_a_head_needs_one_class(self, tmp_path, scenario) -> None:
        Learner().save(tmp_path / "new")
        body = {"image": base64.b64encode(images_of(scenario, count=1)[0]).decode(), "label": "fox"}
        with served(tmp_path / "new") as service, connect(build_app(service)) as client:
            client.post("/correct", json={**body, "new_class": True})
            job = finished(client, client.post("/learn", json={}))
            assert (job["state"], client.get("/classes").json()["classes"]) == ("done", ["fox"])
            answer = client.post("/predict", files=files(images_of(scenario, count=2)))
            assert answer.json()["predictions"][0]["label"] == "fox"

    def test_a_folder_on_the_server(self, folder, scenario, tmp_path) -> None:
        with zipfile.ZipFile(io.BytesIO(second_task_zip(scenario))) as archive:
            archive.extractall(tmp_path / "sessions" / "monday")
        with served(folder, session_folder=tmp_path / "sessions") as service:
            client = connect(build_app(service))
            assert (
                finished(client, client.post("/learn", json={"folder": "monday"}))["version"] == 2
            )
            for bad in ("../learner", "/etc", "nowhere", "monday\0", "x" * 5000):
                answer = client.post("/learn", json={"folder": bad})
                assert answer.status_code == 400
                assert "there is no folder" in answer.json()["error"]

    def test_pipes_and_large_files_in_a_folder_on_the_server(self, folder, tmp_path) -> None:
        image = tmp_path / "sessions" / "monday" / "fox" / "1.png"
        image.parent.mkdir(parents=True)
        with served(folder, session_folder=tmp_path / "sessions") as service:
            client = connect(build_app(service))
            os.mkfifo(image)  # nothing ever writes to it
            answer = client.post("/learn", json={"folder": "monday"})
            assert (answer.status_code, "is not a file" in answer.text) == (400, True)
            image.unlink()
            with image.open("wb") as file:
                file.truncate(64_000_001)
            answer = client.post("/learn", json={"folder": "monday"})
            assert (answer.status_code, "is too large" in answer.text) == (413, True)

    @pytest.mark.filterwarnings("ignore:the session has")
    def test_corrections_join_the_next_session(self, folder, scenario) -> None:
        known = scenario.tasks[0].classes[0]
        with served(folder) as service, connect(build_app(service)) as client:
            nothing = client.post("/learn", json={})
            assert (nothing.status_code, nothing.json()["error"].split(":")[0]) == (
                400, "there is nothing to learn")  # fmt: skip
            for n, image in enumerate(images_of(scenario, count=4)):
                body = {"image": base64.b64encode(image).decode(), "label": known}
                assert client.post("/correct", json=body).json() == {"waiting": n + 1}
            job = finished(client, client.post("/learn", json={}))
            assert (job["state"], job["classes"], job["images"]) == ("done", [known], 4)
            assert client.get("/status").json()["corrections"] == 0

    def test_corrections_can_be_discarded(self, folder, scenario) -> None:
        with served(folder) as service, connect(build_app(service)) as client:
            for image in images_of(scenario, count=2):
                body = {
                    "image": base64.b64encode(image).decode(),
                    "label": "a slip",
                    "new_class": True,
                }
                client.post("/correct", json=body)
            assert client.post("/correct/forget").json() == {"forgotten": 2}
            assert client.post("/correct/forget").json() == {"forgotten": 0}
            assert client.post("/learn", json={}).status_code == 400
            noted = [line["what"] for line in client.get("/audit").json()]
        assert noted.count("forgot corrections") == 1

    def test_a_waiting_session_can_be_cancelled(self, folder, scenario) -> None:
        before = Learner.load(folder).digest()
        with served(folder) as service, connect(build_app(service)) as client:
            release = block_writer(service)
            job = post_session(client, scenario).json()
            assert client.post(f"/jobs/{job['id']}/cancel").json()["state"] == "waiting"
            release.set()
            service.job(job["id"]).ended.wait()
            ended = client.get(f"/jobs/{job['id']}").json()
            assert (ended["state"], ended["said"]) == ("cancelled", "nothing changed")
            assert len(client.get("/classes").json()["classes"]) == 3
        assert Learner.load(folder).digest() == before

    def test_a_session_cancelled_while_the_canary_is_measured_is_not_published(
        self, folder, scenario, monkeypatch
    ) -> None:
        with served(folder) as service, connect(build_app(service)) as client:
            measure = Canary.measure

            def cancelling(canary, learner):
                job = next(iter(service.jobs()))
                if job.step == job.total_steps > 0:  # after training
                    service.writer.cancel(job)
                return measure(canary, learner)

            monkeypatch.setattr(Canary, "measure", cancelling)
            job = finished(client, post_session(client, scenario))
            assert (job["state"], job["said"]) == ("cancelled", "nothing changed")
            assert client.get("/status").json()["version"] == 1
            assert len(client.get("/classes").json()["classes"]) == 3

    def test_a_session_cancelled_in_the_middle_changes_nothing_and_returns_corrections(
        self, folder, scenario, monkeypatch
    ) -> None:
        before = Learner.load(folder).digest()
        with served(folder) as service, connect(build_app(service)) as client:
            image = base64.b64encode(images_of(scenario)[0]).decode()
            client.post("/correct", json={"image": image, "label": "owl", "new_class": True})
            training_steps = Learner.training_steps

            def cancelling(learner, session, start=0, **options):
                for n, step in enumerate(training_steps(learner, session, start, **options)):
                    if n == 1:
                        next(iter(service.jobs())).cancelled.set()
                    yield step

            monkeypatch.setattr(Learner, "training_steps", cancelling)
            job = finished(client, post_session(client, scenario))
            assert (job["state"], job["step"]) == ("cancelled", 2)
            monkeypatch.undo()
            status = client.get("/status").json()
            assert status["at_work"]
            assert (status["version"], status["corrections"]) == (1, 1)
            assert len(client.get("/classes").json()["classes"]) == 3
            again = finished(client, post_session(client, scenario))
            assert again["state"] == "done"
            assert client.get("/status").json()["corrections"] == 0
            assert client.post("/rollback", json={"version": 1}).status_code == 200
        assert Learner.load(folder).digest() == before

    def test_an_unexpected_error_does_not_end_the_service(
        self, folder, scenario, monkeypatch, caplog
    ) -> None:
        with served(folder) as service, connect(build_app(service)) as client:

            def broken(*_, **options):
                raise ZeroDivisionError("oh")

            monkeypatch.setattr(Learner, "adapt", broken)
            client.post("/predict", files=files(images_of(scenario)))
            wait_until(lambda: service.writer.last_error)
            monkeypatch.undo()
            assert client.get("/status").json()["trouble"] == "ZeroDivisionError: oh"
            for _ in range(2):
                client.post("/predict", files=files(images_of(scenario)))
            wait_until(lambda: service.version > 1)
        assert "ZeroDivisionError" in caplog.text

    def test_predictions_go_on_during_a_session(self, folder, scenario) -> None:
        with served(folder, adapt=False) as service, connect(build_app(service)) as client:
            release = block_writer(service)
            job = post_session(client, scenario).json()
            versions = {client.post("/predict", files=files(images_of(scenario))).json()["version"]}
            release.set()
            while not service.job(job["id"]).ended.is_set():
                answer = client.post("/predict", files=files(images_of(scenario, count=1)))
                assert answer.status_code == 200
                versions.add(answer.json()["version"])
            last = client.post("/predict", files=files(images_of(scenario, count=1))).json()
        assert 1 in versions
        assert last["version"] == 2  # the session's, without a restart

    def test_a_session_that_harms_the_canary_is_not_published(
        self, folder, scenario, falling_canary
    ) -> None:
        before = Learner.load(folder).digest()
        with served(folder, canary=falling_canary) as service:
            client = connect(build_app(service))
            job = finished(client, post_session(client, scenario))
            assert job["state"] == "refused", job
            assert "on earlier classes the canary fell" in job["said"]
            assert client.get("/ready").json()["version"] == 1
        assert Learner.load(folder).digest() == before

    def test_the_queue_of_sessions_is_limited(self, folder, scenario) -> None:
        with served(folder, max_jobs=2) as service, connect(build_app(service)) as client:
            release = block_writer(service)
            codes = [post_session(client, scenario).status_code for _ in range(4)]
            for job in service.jobs():
                service.writer.cancel(job)
            release.set()
        assert codes == [202, 202, 429, 429]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
class TestWriterThatEnds:
    def test_waiting_commands_and_sessions_fail(self, folder, scenario) -> None:
        with served(folder) as service, connect(build_app(service)) as client:
            image = base64.b64encode(images_of(scenario)[0]).decode()
            client.post("/correct", json={"image": image, "label": "owl", "new_class": True})
            release = block_writer(service)
            service.writer.submit(sys.exit)
            job = post_session(client, scenario).json()
            order = service.writer.submit(lambda: 1)
            release.set()
            with pytest.raises(UnavailableError, match="will not be done; restart the service"):
                order.result(60)
            assert service.job(job["id"]).ended.wait(60)
            ended = client.get(f"/jobs/{job['id']}").json()
            assert (ended["state"], ended["said"]) == ("failed", WRITER_ENDED)
            assert client.get("/status").json()["corrections"] == 1
            wait_until(lambda: client.get("/ready").status_code == 503)

    def test_new_sessions_and_commands_are_refused(self, folder, scenario) -> None:
        with served(folder) as service, connect(build_app(service)) as client:
            service.writer.submit(sys.exit)
            wait_until(lambda: not service.writer.is_alive)
            assert post_session(client, scenario).status_code == 503
            assert client.get("/jobs").json() == []
            assert client.post("/rollback", json={"version": 1}).status_code == 503

    def test_the_session_in_progress_fails(self, folder, scenario, monkeypatch) -> None:
        with served(folder) as service, connect(build_app(service)) as client:
            monkeypatch.setattr(Learner, "training_steps", lambda *_, **options: sys.exit())
            job = finished(client, post_session(client, scenario))
        assert (job["state"], job["said"]) == ("failed", WRITER_ENDED)


@pytest.fixture
def falling_canary(monkeypatch, scenario) -> Canary:
    """A canary whose margins fall with every measurement, from 19 of 20 right."""
    falls = itertools.count(1.5, 4)

    def measure(canary: Canary, learner: Learner) -> CanaryGaps:
        margins, truth = torch.arange(20.0) - next(falls), torch.zeros(20, dtype=torch.int64)
        now, before = (
            torch.stack([torch.zeros(20), -m], dim=1) for m in (margins, torch.arange(20.0) - 0.5)
        )
        return CanaryGaps([learner.classes[0]] * 20, truth, now, before)

    monkeypatch.setattr(Canary, "measure", measure)
    images = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    return Canary.from_images(images, [scenario.tasks[0].classes[0]])


class TestClasses:
    def test_names_that_look_equal_are_one_class(self, folder) -> None:
        with served(folder) as service, connect(build_app(service)) as client:
            old = service.classes[0]
            client.post("/classes/rename", json={"name": old, "to": "cafe\u0301"})
            assert service.classes[0] == "caf\u00e9"

    def test_rename_and_remove(self, folder) -> None:
        first, second, third = Learner.load(folder).classes
        with served(folder) as service, connect(build_app(service)) as client:
            said = client.post("/classes/rename", json={"name": first, "to": "renard_roux"})
            assert said.json() == {"version": 2}
            assert client.post("/classes/remove", json={"name": second}).json() == {"version": 3}
            assert client.get("/classes").json() == {
                "version": 3,
                "classes": ["renard roux", third],
            }
            for path, body in (("rename", {"name": first, "to": "x"}), ("remove", {"name": "x"}),
                               ("rename", {"name": third, "to": "renard roux"})):  # fmt: skip
                assert client.post(f"/classes/{path}", json=body).status_code == 400
            reasons = [v["reason"] for v in client.get("/versions").json()]
        assert reasons[1:] == [f"renamed '{first}' to 'renard roux'", f"removed '{second}'"]
        assert Learner.load(folder).classes == ["renard roux", third]

    @pytest.mark.filterwarnings("ignore:the session has")
    def test_waiting_corrections_follow_their_class(self, folder, scenario) -> None:
        first, second, third = Learner.load(folder).classes
        images = [base64.b64encode(image).decode() for image in images_of(scenario, count=3)]
        image = images[0]
        with served(folder) as service, connect(build_app(service)) as client:
            for corrected, label in zip(images, (first, first, second), strict=True):
                client.post("/correct", json={"image": corrected, "label": label})
            client.post("/classes/rename", json={"name": first, "to": "wolf"})
            client.post("/classes/remove", json={"name": second})
            assert client.get("/status").json()["corrections"] == 2
            job = finished(client, client.post("/learn", json={}))
            assert (job["state"], job["classes"], job["images"]) == ("done", ["wolf"], 2)
            assert client.get("/classes").json()["classes"] == ["wolf", third]
            client.post("/correct", json={"image": image, "label": third})
            refused = client.post("/classes/rename", json={"name": third, "to": "wolf"})
            assert refused.status_code == 400
            assert client.post("/classes/remove", json={"name": third}).status_code == 200
            assert client.post("/learn", json={}).status_code == 400  # nothing waits


class TestVersions:
    def test_rollback_and_forward_again_is_bit_exact(self, folder, scenario) -> None:
        images = files(images_of(scenario, count=4))
        with served(folder, interval=1) as service, connect(build_app(service)) as client:

            def answers() -> list:
                return client.post("/predict?learn=false", files=images).json()["predictions"]

            first = answers()
            client.post("/predict", files=files(images_of(scenario)))
            wait_until(lambda: service.version > 1)
            second = answers()
            assert first != second
            assert client.post("/rollback", json={"version": 1}).json() == {"version": 3}
            assert answers() == first
            assert client.post("/rollback", json={"version": 2}).json() == {"version": 4}
            assert answers() == second
            missing = client.post("/rollback", json={"version": 99})
            assert missing.status_code == 400
            assert "has no version 99; it has 1 to 4" in missing.json()["error"]
            one = client.get("/versions/2").json()
            assert one["class_count"] == 3
            assert one["seen"]["disagreement"] >= 0
            assert client.get("/versions/7").status_code == 404

    def test_the_replay_buffer_keeps_images_of_known_classes_after_a_rollback(
        self, tiny, tmp_path
    ) -> None:
        scenario = save_trained_learner(tiny, tmp_path / "x", buffer_size=6)
        with served(tmp_path / "x") as service, connect(build_app(service)) as client:
            finished(client, post_session(client, scenario))
            assert len(service.writer.learner.replay_buffer) == 6
            assert client.post("/rollback", json={"version": 1}).json() == {"version": 3}
        checkpoint = next((tmp_path / "x").rglob("working*.safetensors"))
        assert checkpoint.stat().st_mode & 0o077 == 0  # it holds images
        buffer = Learner.load(tmp_path / "x").replay_buffer
        assert len(buffer) == 3  # what the second session had left of the first
        assert all((labels < 3).all() for labels in buffer.labels)

    def test_waiting_commands_do_not_delay_predictions(self, folder, scenario) -> None:
        import threading

        with served(folder, max_pending=3) as service, connect(build_app(service)) as client:
            release, codes = block_writer(service), []

            def order() -> None:
                codes.append(client.post("/rollback", json={"version": 1}).status_code)

            waiting = [threading.Thread(target=order) for _ in range(6)]
            for one in waiting:
                one.start()
            wait_until(lambda: len(codes) == 3)  # no room for these
            assert codes == [429] * 3
            assert client.post("/predict", files=files(images_of(scenario))).status_code == 200
            release.set()
            for one in waiting:
                one.join()
        assert sorted(codes) == [200] * 3 + [429] * 3

    def test_a_frozen_service_stays_frozen_after_a_restart(self, folder, scenario) -> None:
        with served(folder) as service, connect(build_app(service)) as client:
            assert client.post("/freeze").json() == {"frozen": True, "trouble": ""}
            client.post("/predict", files=files(images_of(scenario)))
            assert service.writer.waiting == 0
        with served(folder) as service, connect(build_app(service)) as client:
            assert client.get("/status").json()["frozen"] == "frozen by localhost"
            assert client.post("/unfreeze").json() == {"frozen": False, "trouble": ""}
            assert client.get("/status").json()["frozen"] == ""
            client.post("/predict", files=files(images_of(scenario)))
            wait_until(lambda: service.writer.signals.adapted)
        lines = (folder / "audit.jsonl").read_text().splitlines()
        assert [json.loads(line)["what"] for line in lines] == ["froze", "unfroze"]

    def test_a_folder_has_one_writer(self, folder) -> None:
        with (
            served(folder),
            pytest.raises(BusyError, match="written by another process"),
            served(folder),
        ):
            pass

    @pytest.mark.parametrize("file", ["versions/000002.safetensors", "working.safetensors"])
    def test_a_corrupt_record_is_skipped_at_the_start(self, folder, scenario, file) -> None:
        learner = Learner.load(folder)
        learner.adapt(scenario.session(0).unlabelled.read(range(8)))
        learner.save(folder)
        path = folder / file
        path.write_bytes(path.read_bytes()[:-100])
        with contextlib.ExitStack() as stack:
            with pytest.warns(UserWarning, match="continuing from version"):
                service = stack.enter_context(served(folder))
            client = stack.enter_context(connect(build_app(service)))
            known = 2 if file.startswith("working") else 1
            assert client.get("/ready").json()["version"] == known
            assert [v["number"] for v in client.get("/versions").json()] == [1, 2][:known]
            assert client.post("/rollback", json={"version": 1}).json() == {"version": known + 1}

    def test_a_version_corrupted_while_serving_is_left_out(self, folder) -> None:
        with served(folder) as service, connect(build_app(service)) as client:
            assert client.post("/rollback", json={"version": 1}).json() == {"version": 2}
            path = folder / "versions/000002.safetensors"
            path.write_bytes(path.read_bytes()[:-100])
            with pytest.warns(UserWarning, match=r"000002.*is torn.*are skipped"):
                assert [v["number"] for v in client.get("/versions").json()] == [1]
            assert client.get("/versions/2").status_code == 500

    def test_old_versions_are_merged(self, folder, scenario) -> None:
        with (
            served(folder, keep_versions=4, interval=1) as service,
            connect(build_app(service)) as client,
        ):
            for wanted in range(2, 9):
                client.post("/predict", files=files(images_of(scenario)))
                wait_until(lambda wanted=wanted: service.version == wanted)
        known = [v.number for v in Learner.open_history(folder).versions()]
        assert len(known) <= 5
        assert known[-1] == 8
        assert Learner.load(folder).history(folder).head == 8


class TestGuards:
    def test_a_batch_of_one_class_is_held_back(self, folder, scenario) -> None:
        with served(folder) as service, connect(build_app(service)) as client:
            same = images_of(scenario, count=1) * 8
            client.post("/predict", files=files(same))
            wait_until(lambda: service.writer.signals.held)
            signals = client.get("/status").json()["signals"]
            assert (signals["held"], signals["adapted"]) == (8, 0)
            assert signals["skew"] == 1  # over the classes known, not over those seen
        assert Learner.open_history(folder).head == 1

    def test_intervals_that_harm_the_canary_are_refused_until_it_freezes(
        self, folder, scenario, falling_canary
    ) -> None:
        before = Learner.load(folder).digest()
        with served(folder, canary=falling_canary, interval=1, max_refusals=2) as service:
            client = connect(build_app(service))
            for strike in (1, 2):
                client.post("/predict", files=files(images_of(scenario)))
                wait_until(lambda strike=strike: service.writer.signals.refused == strike)
            wait_until(lambda: service.writer.frozen)
            status = client.get("/status").json()
            assert "refused 2 intervals in a row: one class gained" in (
                status["frozen"])  # fmt: skip
            assert status["version"] == 1
            service.close()
            entries = [d["what"] for d in service.audit.last()]
        assert entries == ["refused", "refused", "froze"]
        assert Learner.load(folder).digest() == before

    def test_an_interval_with_too_much_disagreement_is_not_published(
        self, folder, scenario, monkeypatch
    ) -> None:
        """Over an interval, not over a step: here 0 and 60 %, then 0 and 0."""
        before, shares, adapt = (
            Learner.load(folder).digest(),
            iter([0.0, 0.6, 0.0, 0.0]),
            Learner.adapt,
        )

        def differing(learner, images):
            return replace(adapt(learner, images), disagreement=next(shares))

        monkeypatch.setattr(Learner, "adapt", differing)
        with (
            served(folder, max_disagreement=0.2) as service,
            connect(build_app(service)) as client,
        ):
            for _ in range(2):
                client.post("/predict", files=files(images_of(scenario)))
            wait_until(lambda: service.writer.signals.refused)
            assert service.writer.learner.digest() == before
            for _ in range(2):
                client.post("/predict", files=files(images_of(scenario)))
            wait_until(lambda: service.version == 2)
            entries = client.get("/audit").json()
            seen = client.get("/versions/2").json()["seen"]
        assert [(d["what"], d["who"], d["why"]) for d in entries] == [
            ("refused", "guard", "the experts disagree on 30% of the stream")]  # fmt: skip
        assert seen["disagreement"] == 0

    def test_captions_and_class_statistics_may_disagree(self, tiny, tmp_path, monkeypatch) -> None:
        """They do so on any stream, and one of them labels it; the canary decides."""
        scenario = save_trained_learner(tiny, tmp_path / "x", method="stream-gda-ensemble")
        adapt = Learner.adapt
        monkeypatch.setattr(Learner, "adapt", lambda *args: replace(adapt(*args), disagreement=0.6))
        with served(tmp_path / "x", max_disagreement=0.2) as service:
            for _ in range(2):
                connect(build_app(service)).post("/predict", files=files(images_of(scenario)))
            wait_until(lambda: service.version == 2)
            assert service.history.version(2).seen["disagreement"] == 0.6
            assert service.writer.signals.refused == 0

    def test_a_folder_of_images_is_the_canary(self, folder, scenario, tmp_path) -> None:
        """Every image, with the name of its folder; unknown classes do not count."""
        task, place = scenario.tasks[0], tmp_path / "canary"
        for n in range(6):
            name = task.classes[task.test.labels[n]].replace(" ", "_")
            (place / name).mkdir(parents=True, exist_ok=True)
            (place / name / f"{n}.png").write_bytes(encode_png(task.test.read([n])[0]))
        (place / "not_known").mkdir()
        (place / "not_known" / "0.png").write_bytes(encode_png(task.test.read([0])[0]))
        learner = Learner.load(folder)
        truth = [task.classes[n] for n in task.test.labels[:6]]
        right = sum(
            p.label == t
            for p, t in zip(learner.predict(task.test.read(range(6))), truth, strict=True)
        )
        with served(folder, canary=place, session_drop=100.0) as service:
            canary = service.writer.learner.canary
            assert canary.classes == {*truth, "not known"}
            margins = canary.measure(service.writer.learner)
            assert sorted(margins.labels) == sorted(truth)
            assert margins.accuracy == pytest.approx(100 * right / 6)
            client = connect(build_app(service))
            finished(client, post_session(client, scenario))
            seen = client.get("/versions/2").json()["seen"]
            watched = client.get("/status").json()["signals"]["canary"]
        assert watched == [{"version": 2, "accuracy": seen["canary"]}]


class TestAudit:
    def test_failed_and_refused_sessions_are_audited_with_their_caller(
        self, folder, scenario, monkeypatch, falling_canary
    ) -> None:
        head = {"Authorization": f"Bearer {Tokens(folder).add('alice', 'teach')}"}
        with served(folder, canary=falling_canary, token=True) as service:
            client = connect(build_app(service))
            client.headers.update(head)
            image = base64.b64encode(images_of(scenario)[0]).decode()
            client.post("/correct", json={"image": image, "label": "great_owl", "new_class": True})
            refused = finished(client, post_session(client, scenario))

            def broken(*_, **options):
                raise ZeroDivisionError("oh")

            monkeypatch.setattr(Learner, "training_steps", broken)
            failed = finished(client, post_session(client, scenario))
            entries = client.get("/audit").json()
        assert [(d["what"], d["who"]) for d in entries] == [
            ("corrected", "alice"), ("refused", "alice"), ("failed", "alice")]  # fmt: skip
        assert entries[0]["class"] == "great owl"
        assert [(d["job"], d["why"], d["version"]) for d in entries[1:]] == [
            (job["id"], job["said"], 1) for job in (refused, failed)]  # fmt: skip
        assert "the canary fell" in refused["said"]
        assert failed["said"] == "ZeroDivisionError: oh"
        assert image not in (folder / "audit.jsonl").read_text()


class TestReplicas:
    def test_a_replica_follows_and_does_not_write(self, folder, scenario) -> None:
        images = files(images_of(scenario, count=2))
        with (
            served(folder) as writer,
            open_service(folder, ServiceSettings(token=False), follow=True) as replica,
        ):
            here, there = connect(build_app(writer)), connect(build_app(replica))
            finished(here, post_session(here, scenario))
            wait_until(lambda: replica.version == 2)
            ours, theirs = (c.post("/predict?learn=false", files=images) for c in (here, there))
            assert ours.json() == theirs.json()
            assert theirs.json()["version"] == 2
            refused = there.post("/freeze")
            assert refused.status_code == 409
            assert "only reads" in refused.json()["error"]
            with pytest.raises(ReadOnlyError):
                replica.rollback(1, "me")
            assert there.get("/status").json()["writes"] is False

    def test_a_replica_follows_a_head_replaced_under_the_same_number(
        self, folder, scenario
    ) -> None:
        other = Path(shutil.copytree(folder, folder.parent / "other"))
        for place, rows in ((folder, range(8)), (other, range(8, 16))):
            learner = Learner.load(place)
            learner.adapt(scenario.session(0).unlabelled.read(rows))
            learner.save(place)
        wanted = Learner.load(other).digest()
        with open_service(folder, ServiceSettings(), follow=True) as replica:
            assert replica.version == 2
            for name in ("versions/000002.safetensors", "working.safetensors"):
                write_bytes(folder / name, (other / name).read_bytes())
            wait_until(lambda: replica.reader.published.learner.digest() == wanted)
            assert replica.version == 2
