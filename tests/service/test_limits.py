"""Limits and fairness: one caller, or a stranger, cannot take the service from the others."""

import contextlib
import http.client
import io
import json
import select
import socket
import threading
import time
import weakref
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from dosapp.drills.service_process import encode_test_images, zip_session
from dosapp.errors import BusyError, InputError
from dosapp.service.fair_queue import FairPool, FairQueue
from dosapp.service.service import open_service
from dosapp.service.settings import ServiceSettings
from dosapp.service.tokens import Tokens
from dosapp.service.uploads import PixelRoom, normalize_class_name

pytest.importorskip("fastapi")
from starlette.testclient import TestClient

from dosapp.service.http.app import build_app
from dosapp.service.http.limits import Limits, Pacer
from support.services import block_writer, serve_at_port, wait_until

QUICK = {"threads": 1, "batch_wait": 0.0, "adapt": False}


def served(folder: Path, **changes: object):
    settings: ServiceSettings = ServiceSettings.parse({**QUICK, **changes})
    return open_service(folder, settings)


def connect(service, token: str = "") -> TestClient:
    head = {"Authorization": f"Bearer {token}"} if token else {}
    return TestClient(build_app(service), "http://127.0.0.1", client=("127.0.0.1", 1), headers=head)


@contextlib.contextmanager
def listening(folder: Path, **changes: object):
    """A service at a port: its address, and tokens of an honest and a hostile caller."""
    tokens = Tokens(folder)
    names = {name: tokens.add(name, "predict") for name in ("honest", "hostile")}
    with served(folder, **changes) as service, serve_at_port(service) as url:
        yield ("127.0.0.1", int(url.rpartition(":")[2].strip("/"))), names, service


def ask(address, path: str = "/classes", token: str = "", method: str = "GET", more: str = "",
        body: bytes = b"") -> socket.socket:  # fmt: skip
    """Send a request, or its beginning, and leave the connection open."""
    connection = socket.create_connection(address, timeout=30)
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n{more}\r\n"
    connection.sendall(head.encode() + body)
    return connection


def read_status(connection: socket.socket) -> int:
    with connection, connection.makefile("rb") as file:
        return int(file.readline().split()[1])


class TestTurns:
    def test_callers_take_turns(self) -> None:
        queue: FairQueue[str] = FairQueue()
        for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
            queue.put(item[0], item)
        assert [queue.pop() for _ in range(6)] == ["a1", "b1", "c1", "a2", "c2", "a3"]
        assert len(queue) == 0

    def test_threads_work_for_callers_in_turn(self) -> None:
        pool, go, order = FairPool(1, "test"), threading.Event(), []
        first = pool.submit("a", go.wait)
        futures = [pool.submit(name[0], lambda name=name: order.append(name))
                   for name in ("a1", "a2", "a3", "b1")]  # fmt: skip
        go.set()
        for future in [first, *futures]:
            future.result(60)
        assert order == ["a1", "b1", "a2", "a3"]
        waiting = pool.submit("a", threading.Event().wait) and pool.submit("a", go.wait)
        pool.close()
        assert waiting.cancelled()

    def test_a_caller_with_many_images_does_not_delay_another(self, folder) -> None:
        """Of 200 images that wait, at most two batches come before another caller's one."""
        with served(folder, batch_size=8, max_caller_queue=256) as service:
            answered: list[str] = []
            predict, held = service.reader.published.learner.predict, threading.Event()
            begun = threading.Event()

            def slow(pixels, top):
                begun.set()
                held.wait(60)
                return predict(pixels, top)

            service.reader.published.learner.predict = slow
            many = service.reader.submit(torch.zeros(200, 3, 32, 32, dtype=torch.uint8), 1, "many")
            assert begun.wait(60)
            one = service.reader.submit(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), 1, "one")
            many.add_done_callback(lambda _: answered.append("many"))
            one.add_done_callback(lambda _: answered.append("one"))
            held.set()
            assert len(many.result(60).predictions) == 200
            assert answered == ["one", "many"]
            wait_until(lambda: service.reader.waiting == 0)

    def test_a_request_in_several_batches_is_answered_by_one_version(self, folder) -> None:
        from dosapp.service.reader import Published

        with served(folder, batch_size=4) as service:
            old = service.reader.published
            predict, calls = old.learner.predict, []

            def change_version(pixels, top):
                calls.append(len(pixels))
                service.reader.published = Published(7, old.learner)
                return predict(pixels, top)

            old.learner.predict = change_version
            pixels = torch.zeros(10, 3, 32, 32, dtype=torch.uint8)
            assert service.reader.submit(pixels, 1).result(60).version == 1
            assert calls == [4, 4, 2]
            assert service.reader.submit(pixels, 1).result(60).version == 7

    def test_a_failed_batch_ends_its_whole_request(self, folder, monkeypatch) -> None:
        with served(folder, batch_size=4) as service:
            learner = service.reader.published.learner

            def fail(*_):
                raise InputError("no")

            monkeypatch.setattr(learner, "predict", fail)
            pixels = torch.zeros(10, 3, 32, 32, dtype=torch.uint8)
            with pytest.raises(InputError, match="no"):
                service.reader.submit(pixels, 1).result(60)
            monkeypatch.undo()
            assert len(service.reader.submit(pixels, 1).result(60).predictions) == 10
            wait_until(lambda: service.reader.waiting == 0)

    def test_a_caller_is_let_in_although_another_has_filled_the_queue(self, folder) -> None:
        with served(folder, max_queue=8, max_caller_queue=8) as service:
            reader, pixels = service.reader, torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
            predict, held = reader.published.learner.predict, threading.Event()

            def slow(pixels, top):
                held.wait(60)
                return predict(pixels, top)

            reader.published.learner.predict = slow
            reader.submit(pixels, 1, "hostile")
            for count in (1, 8):
                with pytest.raises(BusyError, match="8 images of 'hostile' wait"):
                    reader.submit(pixels[:count], 1, "hostile")
            honest = reader.submit(pixels, 1, "honest")
            held.set()
            assert len(honest.result(60).predictions) == 8


class TestSlots:
    def test_each_caller_has_its_own(self) -> None:
        limits = Limits(ServiceSettings(max_requests=4, max_caller_requests=3))
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(limits.hold_slot("hostile"))
            with pytest.raises(BusyError, match="3 requests of one caller"):
                stack.enter_context(limits.hold_slot("hostile"))
            stack.enter_context(limits.hold_slot("honest"))
            stack.enter_context(limits.hold_slot("other"))  # has none, so it gets one
            with pytest.raises(BusyError, match="4 requests at once"):
                stack.enter_context(limits.hold_slot("honest"))
        with contextlib.ExitStack() as stack:  # all were given back
            for _ in range(3):
                stack.enter_context(limits.hold_slot("hostile"))

    def test_bodies_of_one_caller_together_are_as_large_as_one(self) -> None:
        limits = Limits(ServiceSettings(max_body=1000))
        with limits.hold_slot("a") as one, limits.hold_slot("a") as two:
            limits.count_bytes(one, 900)
            with pytest.raises(BusyError, match="other requests of this caller"):
                limits.count_bytes(two, 200)
            with limits.hold_slot("b") as other:
                limits.count_bytes(other, 900)
                with limits.hold_slot("c") as third:
                    limits.count_bytes(third, 200)  # everyone gets a quarter
                    with pytest.raises(BusyError, match="take all room"):
                        limits.count_bytes(third, 200)
        with limits.hold_slot("a") as one, limits.hold_slot("a") as two:  # all were given back
            limits.count_bytes(one, 900)
            limits.count_bytes(two, 100)

    def test_a_json_body_is_smaller_than_a_form(self, folder) -> None:
        token = Tokens(folder).add("me", "predict")
        with served(folder, max_body=8000) as service:
            answer = connect(service, token).post("/predict", json={"images": ["x" * 1000]})
        assert answer.status_code == 413
        assert answer.json()["error"] == "a JSON body has at most 1,000 bytes"


class TestConnections:
    def test_requests_without_a_token_take_no_slot_and_end_at_once(self, folder) -> None:
        big = "Content-Length: 60000000\r\n"
        with listening(folder, max_requests=4, max_caller_requests=4) as (address, tokens, _):
            silent = [ask(address, "/predict", "wrong", "POST", big) for _ in range(20)]
            assert read_status(ask(address, token=tokens["honest"])) == 200
            assert read_status(ask(address, "/ready")) == 200
            assert {read_status(connection) for connection in silent} == {401}

    def test_slow_bodies_take_slots_of_their_caller_only_and_end(self, folder, caplog) -> None:
        slow = "Content-Type: image/png\r\nContent-Length: 60000\r\n"
        limits = {"max_requests": 4, "max_caller_requests": 3, "body_timeout": 10.0}
        with listening(folder, **limits) as (address, tokens, _):
            held = [ask(address, "/predict", tokens["hostile"], "POST", slow, b"x" * 99)
                    for _ in range(3)]  # fmt: skip
            wait_until(lambda: read_status(ask(address, token=tokens["hostile"])) == 429)
            assert read_status(ask(address, token=tokens["honest"])) == 200
            assert read_status(ask(address, "/health")) == 200
            assert {read_status(connection) for connection in held} == {408}
            wait_until(lambda: read_status(ask(address, token=tokens["hostile"])) == 200)
            ask(address, "/predict", tokens["hostile"], "POST", slow, b"x").close()  # aborted
            assert read_status(ask(address, token=tokens["honest"])) == 200
        assert not [record for record in caplog.records if record.exc_info]

    def test_silent_connections_are_closed(self, folder) -> None:
        with listening(folder, header_timeout=0.5) as (address, tokens, _):
            silent = [socket.create_connection(address, timeout=30) for _ in range(20)]
            silent[0].sendall(b"GET /classes HTT")
            started = time.monotonic()
            while time.monotonic() - started < 2:  # one byte at a time resets no clock
                with contextlib.suppress(OSError):
                    silent[1].sendall(b"G")
                time.sleep(0.1)

            def is_answered() -> bool:  # a busy machine may be silent for half a second, too
                with contextlib.suppress(IndexError, ConnectionError):
                    return read_status(ask(address, token=tokens["honest"])) == 200
                return False

            wait_until(is_answered)
            for connection in silent:
                with connection, contextlib.suppress(ConnectionError):
                    connection.recv(1000)  # a time-out here is an error

    def test_idle_connections_make_room_for_others(self, folder) -> None:
        with listening(folder, max_connections=8) as (address, tokens, _):
            silent = [socket.create_connection(address, timeout=30) for _ in range(30)]
            assert read_status(ask(address, token=tokens["honest"])) == 200
            for connection in silent:
                connection.close()

    def test_waiting_refusals_make_room_for_others(self, folder, monkeypatch, caplog) -> None:
        refused: list[str] = []

        class Slow(Pacer):
            def delay(self, key: str, *args, **options) -> float:
                if self.rate != 20:
                    return super().delay(key, *args, **options)
                refused.append(key)
                return 3600.0

        monkeypatch.setattr("dosapp.service.http.limits.Pacer", Slow)
        caplog.set_level("INFO", "dosapp.service.http")
        with listening(folder, max_connections=8) as (address, tokens, _):
            waiting = [ask(address, token="wrong") for _ in range(8)]
            wait_until(lambda: len(refused) == 8)
            for _ in range(12):
                assert read_status(ask(address, token=tokens["honest"])) == 200
            for connection in waiting:
                connection.close()
            # Not after an hour: the wait ends with the connection, and the app is not called.
            wait_until(lambda: sum(" 499 " in text for text in caplog.messages) == 8)

    def test_at_the_limit_requests_without_a_token_are_not_parsed(
        self, folder, monkeypatch, caplog
    ) -> None:
        monkeypatch.setattr("dosapp.service.http.connections.FULL_DELAY", 0.1)
        caplog.set_level("INFO", "dosapp.service.http")
        with listening(folder, max_connections=8) as (address, tokens, _):
            silent = [socket.create_connection(address, timeout=30) for _ in range(8)]
            for token in ("", "wrong"):
                assert read_status(ask(address, token=token)) == 503
            assert not caplog.messages
            assert read_status(ask(address, "/ready")) == 200
            assert read_status(ask(address, token=tokens["honest"])) == 200
            for connection in silent:
                connection.close()

    def test_connections_stay_within_the_limit_and_a_few(self, folder, monkeypatch) -> None:
        monkeypatch.setattr("dosapp.service.http.connections.SPARE_CONNECTIONS", 2)
        with listening(folder, max_connections=8) as (address, _, _):
            silent = [socket.create_connection(address, timeout=30) for _ in range(30)]

            def count_closed() -> int:
                return len(select.select(silent, [], [], 0)[0])  # those closed can be read

            wait_until(lambda: count_closed() == 20)
            for connection in silent:
                connection.close()

    def test_a_connection_of_a_known_caller_is_kept_while_others_come(self, folder) -> None:
        limits = {"max_connections": 8, "header_timeout": 60.0}  # more than a busy machine takes
        with listening(folder, **limits) as (address, tokens, _):
            kept = http.client.HTTPConnection(*address, timeout=30)
            head = {"Authorization": f"Bearer {tokens['honest']}"}
            for _ in range(3):
                kept.request("GET", "/classes", headers=head)
                assert kept.getresponse().read()
                own = kept.sock
                silent = [socket.create_connection(address, timeout=30) for _ in range(30)]
                assert read_status(ask(address, "/health")) == 200
                for connection in silent:
                    connection.close()
                assert kept.sock is own
            kept.close()

    def test_endless_headers_are_refused(self, folder) -> None:
        with listening(folder) as (address, _, _):
            connection = socket.create_connection(address, timeout=30)
            connection.sendall(b"GET /classes HTTP/1.1\r\nHost: x\r\n")
            with connection, contextlib.suppress(ConnectionError):
                for n in range(10_000):
                    connection.sendall(b"X-%d: %s\r\n" % (n, b"y" * 100))
                    if n > 1000:
                        time.sleep(0.001)
            assert n < 9_999

    def test_requests_that_are_no_http_wait_for_their_answer(self, folder, monkeypatch) -> None:
        slow = Pacer(rate=1e-6, burst=1)  # the second waits for an hour
        monkeypatch.setattr("dosapp.service.http.limits.MAX_DELAY", 3600.0)
        monkeypatch.setattr("dosapp.service.http.connections.Pacer", lambda rate, burst: slow)
        with listening(folder) as (address, tokens, _):
            first, second = (socket.create_connection(address, timeout=30) for _ in range(2))
            first.sendall(b"no request\r\n\r\n")
            assert read_status(first) == 400
            second.sendall(b"no request\r\n\r\n")
            for _ in range(3):
                assert read_status(ask(address, token=tokens["honest"])) == 200
            second.setblocking(False)
            with second, pytest.raises(BlockingIOError):
                second.recv(1)

    def test_large_bodies_of_one_caller_are_read_at_a_rate(self) -> None:
        pacer = Pacer(rate=1000, burst=500)
        assert pacer.delay("a", now=0.0, count=400) == 0.0
        assert pacer.delay("a", now=0.0, count=400) == 0.0  # within the burst when it began
        assert pacer.delay("a", now=0.0, count=400) == pytest.approx(0.3, abs=0.01)
        assert pacer.delay("b", now=0.0, count=400) == 0.0


class TestImages:
    def png(self, side: int) -> bytes:
        with io.BytesIO() as buffer:
            Image.new("1", (side, side)).save(buffer, "PNG")
            return buffer.getvalue()

    def test_pixels_are_limited_per_request(self, folder) -> None:
        token = Tokens(folder).add("me", "predict")
        data = self.png(100)
        limits = {"max_pixels": 20_000, "max_request_pixels": 45_000}
        with served(folder, **limits) as service:
            client = connect(service, token)
            codes = [client.post("/predict", files=[("images", (f"{n}.png", data))
                                                    for n in range(count)]).status_code
                     for count in (1, 4, 5)]  # fmt: skip
            assert codes == [200, 200, 413]

    def test_no_image_is_open_before_and_after_it_is_decoded(self, folder, monkeypatch) -> None:
        opened, open_image = [], Image.open

        def record(*args, **kwargs):
            image = open_image(*args, **kwargs)
            opened.append(weakref.ref(image))
            return image

        monkeypatch.setattr(Image, "open", record)
        with served(folder) as service:
            checked = service.uploads.check_images([("x.png", self.png(100))] * 3)
            assert [image() for image in opened] == [None] * 3
            service.uploads.decode_part(checked)
            assert [image() for image in opened] == [None] * 6

    def test_large_images_are_decoded_one_at_a_time(self) -> None:
        room, most, now, lock = PixelRoom(100), [], [0], threading.Lock()

        def decode() -> None:
            with room.hold(60):
                with lock:
                    now[0] += 1
                    most.append(now[0])
                time.sleep(0.01)
                with lock:
                    now[0] -= 1

        threads = [threading.Thread(target=decode) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert most == [1] * 5

    def test_large_and_small_images_of_a_request_keep_their_order(self, folder, scenario) -> None:
        token = Tokens(folder).add("me", "predict")
        small = encode_test_images(scenario)[:2]
        with io.BytesIO() as buffer:
            Image.open(io.BytesIO(small[0])).resize((2100, 2100)).save(buffer, "PNG")
            large = buffer.getvalue()
        with served(folder) as service:
            client = connect(service, token)

            def top(*images: bytes) -> list[dict]:
                files = [("images", (f"{n}.png", data)) for n, data in enumerate(images)]
                answer = client.post("/predict", files=files).json()
                return [p["label"] for p in answer["predictions"]]

            alone = [top(data)[0] for data in (small[0], large, small[1])]
            assert top(small[0], large, small[1]) == alone


class TestSessions:
    @pytest.mark.filterwarnings("ignore:Duplicate name")
    def test_two_members_of_one_name_are_refused(self, folder, scenario) -> None:
        token, data = Tokens(folder).add("me", "teach"), encode_test_images(scenario)[0]
        with io.BytesIO() as buffer:
            with zipfile.ZipFile(buffer, "w") as archive:
                for _ in range(2):
                    archive.writestr("x/1.png", data)
            archive_bytes = buffer.getvalue()
        with served(folder) as service:
            answer = connect(service, token).post("/learn", files={"archive": archive_bytes})
        assert answer.status_code == 400
        assert "has 'x/1.png' twice" in answer.json()["error"]

    def test_names_in_utf8_without_the_flag_are_read(self, folder, scenario) -> None:
        data, name = encode_test_images(scenario)[0], "Füchse 🦊/1.png"
        with io.BytesIO() as buffer:
            with zipfile.ZipFile(buffer, "w") as archive:
                archive.writestr(name, data)
            plain = buffer.getvalue()
        raw = bytearray(plain)
        for sign, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # clear the UTF-8 flag
            start = plain.index(sign) + offset
            raw[start + 1] &= ~0x08
        with served(folder) as service:
            for archive_bytes in (plain, bytes(raw)):
                assert list(service.uploads.read_zip(archive_bytes)) == ["Füchse 🦊"]

    @pytest.mark.parametrize("name", ["unknown", " Unknown ", "UN_KNOWN".replace("_", "")])
    def test_no_class_is_called_unknown(self, name) -> None:
        with pytest.raises(InputError, match="means that no class was found"):
            normalize_class_name(name)

    def test_many_cancels_are_one_line_of_the_audit_log(self, folder, scenario) -> None:
        token = Tokens(folder).add("me", "teach")
        with served(folder) as service:
            client, release = connect(service, token), block_writer(service)
            job = client.post("/learn", files={"archive": zip_session(scenario, 1, range(2), 2)})
            for _ in range(20):
                assert client.post(f"/jobs/{job.json()['id']}/cancel").status_code == 200
            for _ in range(5):
                client.post("/freeze")
            release.set()
        lines = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
        assert [line["what"] for line in lines] == ["cancelled", "froze"]

    def test_sessions_sent_together_stay_within_the_limit_of_classes(self, folder) -> None:
        dark = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
        with served(folder, max_classes=5) as service:
            release = block_writer(service)
            service.learn({"a": dark, "b": dark + 9}, "me")
            with pytest.raises(InputError, match="6 classes, with those of sessions that wait"):
                service.learn({"c": dark}, "me")
            service.learn({"b": dark}, "me")
            release.set()

    def test_freeze_acts_at_once_while_the_writer_is_busy(self, folder) -> None:
        token = Tokens(folder).add("me", "teach")
        with served(folder, adapt=True) as service:
            client, release = connect(service, token), block_writer(service)
            assert client.post("/freeze").json() == {"frozen": True, "trouble": ""}
            assert service.status()["frozen"] == "frozen by me"
            assert json.loads((folder / "service.json").read_text())["frozen"] == "frozen by me"
            assert client.post("/unfreeze").json()["frozen"] is False
            release.set()

    def test_reading_versions_does_not_delay_changes(self, folder, monkeypatch) -> None:
        token = Tokens(folder).add("me", "teach")
        with served(folder, max_caller_requests=64, max_pending=2) as service:
            client, go = connect(service, token), threading.Event()
            read = service.history.versions
            monkeypatch.setattr(service.history, "versions", lambda: go.wait(60) and read())
            pollers = [threading.Thread(target=client.get, args=("/versions",)) for _ in range(24)]
            for poller in pollers:
                poller.start()
            rolled = client.post("/rollback", json={"version": 1})
            frozen = client.post("/freeze")
            go.set()
            for poller in pollers:
                poller.join()
        assert (rolled.status_code, frozen.status_code) == (200, 200)
