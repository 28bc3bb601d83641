"""Small requests that once cost the service seconds or gigabytes; found by attacking it."""

import base64
import functools
import io
import json
import socket
import struct
import zlib

import pytest
import torch
from PIL import Image

from dosapp.drills.service_process import encode_png, encode_test_images
from dosapp.service.service import open_service
from dosapp.service.settings import ServiceSettings
from dosapp.service.tokens import Tokens
from dosapp.service.uploads import read_webp_size

pytest.importorskip("fastapi")
import h11
from starlette.testclient import TestClient

from dosapp.service.http.app import build_app
from dosapp.service.http.connections import CHUNKS_AT_ONCE, MAX_HEADERS, SMALL_CHUNK
from dosapp.service.http.limits import Pacer
from dosapp.service.http.requests import InMemoryParser
from support.services import serve_at_port

SETTINGS = {"threads": 1, "batch_wait": 0.0, "adapt": False, "max_images": 8}


@pytest.fixture
def service(folder):
    with open_service(folder, ServiceSettings.parse(SETTINGS)) as service:
        yield service


@pytest.fixture
def client(folder, service) -> TestClient:
    head = {"Authorization": f"Bearer {Tokens(folder).add('me', 'teach')}"}
    return TestClient(build_app(service), "http://127.0.0.1", headers=head)


def segment(marker: int, data: bytes) -> bytes:
    """Part of a JPEG."""
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(data) + 2) + data


def jpeg_of_scans(side: int, scans: int) -> bytes:
    """A grey progressive JPEG; every scan takes 13 bytes and passes over all blocks."""
    one_code = bytes([1] + [0] * 15)
    blocks = (side // 8) ** 2
    assert blocks in range(8, 16384, 8)
    return b"".join([
        b"\xff\xd8", segment(0xDB, b"\0" + b"\1" * 64),
        segment(0xC2, struct.pack(">BHHB", 8, side, side, 1) + b"\1\x11\0"),
        segment(0xC4, b"\0" + one_code + b"\0"),  # DC: no difference
        segment(0xC4, b"\x10" + one_code + b"\xe0"),  # AC: nothing in the next 16,384 blocks
        segment(0xDA, b"\1\1\0\0\0\0"), bytes(blocks // 8),
        (segment(0xDA, b"\1\1\0\1\x3f\0") + b"\0\1") * (scans - 1), b"\xff\xd9",
    ])  # fmt: skip


def tiff_of_one_tile(side: int, tile: int) -> bytes:
    """A grey TIFF whose tile is much larger than the image."""
    data, start = zlib.compress(bytes(tile * tile)), 8 + 2 + 12 * 11 + 4
    tags = [(256, side), (257, side), (258, 8), (259, 8), (262, 1), (277, 1), (284, 1),
            (322, tile), (323, tile), (324, start), (325, len(data))]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data


def rle_bmp(side: int) -> bytes:
    """A BMP of runs."""
    rows = (b"\1\1" * side + b"\0\0") * side + b"\0\1"
    info = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(rows), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 1078 + len(rows), 0, 0, 1078) + info + bytes(1024) + rows


class TestImages:
    def test_a_jpeg_has_a_limited_number_of_scans(self, client) -> None:
        answers = [client.post("/predict", content=jpeg_of_scans(64, scans),
                               headers={"Content-Type": "image/jpeg"})
                   for scans in (100, 101)]  # fmt: skip
        assert [answer.status_code for answer in answers] == [200, 400]
        assert answers[1].json()["error"] == (
            "'the image' is a JPEG of more than 100 scans; save it again"
        )

    def test_usual_jpegs_are_read(self, client, scenario) -> None:
        with io.BytesIO() as buffer:
            image = Image.open(io.BytesIO(encode_test_images(scenario)[0]))
            image.convert("RGB").resize((300, 300)).save(buffer, "JPEG", progressive=True)
            data = buffer.getvalue() + b"\xff\xda" * 1000  # as a video behind the photo may have
        answer = client.post("/predict", content=data, headers={"Content-Type": "image/jpeg"})
        assert answer.status_code == 200

    @pytest.mark.parametrize(("tile", "code"), [(1024, 200), (8192, 413)])
    def test_a_tile_counts_as_what_is_decoded(self, client, tile, code) -> None:
        data = tiff_of_one_tile(64, tile)
        answer = client.post("/predict", content=data, headers={"Content-Type": "image/tiff"})
        assert answer.status_code == code

    @pytest.mark.parametrize("options", [{}, {"lossless": True}, {"save_all": True}])
    def test_a_webp_is_not_opened_until_it_is_decoded(self, client, monkeypatch, options) -> None:
        def encode(side: int) -> bytes:
            with io.BytesIO() as buffer:
                images = [Image.new("RGB", (side + 10, side), colour) for colour in ("red", "blue")]
                more = {"append_images": images[1:]} if "save_all" in options else {}
                images[0].save(buffer, "WEBP", **options, **more)
                return buffer.getvalue()

        assert read_webp_size(encode(50)) == (60, 50)
        assert read_webp_size(b"RIFF\0\0\0\0WAVE") is None
        send = functools.partial(client.post, "/predict", headers={"Content-Type": "image/webp"})
        assert send(content=encode(50)).status_code == 200
        assert send(content=encode(50)[:14]).status_code == 400
        large = encode(5000)  # 25 MP of a few kB; Pillow would allocate 200 MB to tell its size
        monkeypatch.delattr("PIL.WebPImagePlugin._webp.WebPAnimDecoder")
        assert send(content=large).status_code == 413

    @pytest.mark.parametrize("data", [
        b"P6 8 8 254 " + bytes(192), b"P3 8 8 255 " + b"1 " * 192, rle_bmp(8),
    ])  # fmt: skip
    def test_kinds_that_pillow_decodes_in_python_are_refused(self, client, data) -> None:
        answer = client.post("/predict", content=data, headers={"Content-Type": "image/x"})
        assert answer.status_code == 400
        assert "save it as PNG or JPEG" in answer.json()["error"]


class TestBodies:
    @pytest.mark.parametrize("path", ["/predict", "/rollback"])
    @pytest.mark.parametrize("body", [
        '{"images": [' + "1," * 1_000_000 + "1]}",
        "{" + ",".join(f'"{n}": 1' for n in range(300_000)) + "}",
    ])  # fmt: skip
    def test_a_json_body_of_many_wrong_values_is_not_parsed(self, client, path, body) -> None:
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413  # 400 would name the first of an error for each value

    def test_as_many_urls_as_images_are_read(self, client, scenario) -> None:
        text = base64.b64encode(encode_test_images(scenario)[0]).decode()
        body = json.dumps({"images": ["data:image/png;base64," + text] * SETTINGS["max_images"]})
        answer = client.post("/predict", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200

    def test_a_form_is_read_up_to_the_limit_of_images(self, client, monkeypatch) -> None:
        parsed, begin = [], InMemoryParser.on_part_begin
        monkeypatch.setattr(
            InMemoryParser, "on_part_begin", lambda parser: (parsed.append(1), begin(parser))
        )
        answer = client.post("/predict", files=[("images", ("x.png", b"x"))] * 2000)
        assert answer.status_code == 413
        assert "more than 8 files, which is the limit" in answer.json()["error"]
        assert len(parsed) < 500  # the rest of the piece in which the limit was reached

    def test_a_form_has_a_limited_number_of_fields(self, client) -> None:
        answer = client.post("/predict", data={f"a{n}": "b" for n in range(101)},
                             files=[("images", ("x.png", b"x"))])  # fmt: skip
        assert answer.status_code == 413
        assert "more than 100 fields, which is the limit" in answer.json()["error"]

    @pytest.mark.parametrize("version", [True, "1", 1.0])
    def test_a_version_is_a_number(self, client, version) -> None:
        assert client.post("/rollback", json={"version": version}).status_code == 400


def chunked(data: bytes, size: int) -> bytes:
    """A body in chunks of a few bytes each, with its end."""
    parts = (data[n : n + size] for n in range(0, len(data), size))
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


class TestChunks:
    def send(self, address, path: str, token: str, body: bytes) -> socket.socket:
        connection = socket.create_connection(address, timeout=30)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
            "Content-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        return connection

    def answer(self, connection: socket.socket) -> bytes:
        with connection, connection.makefile("rb") as file:
            return file.readline()

    def test_small_ones_are_parsed_at_a_rate(self, folder, service, monkeypatch) -> None:
        """Without a token too; other requests are answered meanwhile."""
        parsed, next_event = [], h11.Connection.next_event

        def count(connection):
            event = next_event(connection)
            if isinstance(event, h11.Data) and event.chunk_start:
                parsed.append(event)
            return event

        monkeypatch.setattr(h11.Connection, "next_event", count)
        monkeypatch.setattr("dosapp.service.http.limits.MAX_DELAY", 3600.0)
        monkeypatch.setattr(
            "dosapp.service.http.connections.Pacer", lambda rate, burst: Pacer(1e-6, 1)
        )
        token = Tokens(folder).add("me", "predict")
        with serve_at_port(service) as url:
            address = ("127.0.0.1", int(url.rpartition(":")[2].strip("/")))
            hostile = [self.send(address, "/predict", "wrong", chunked(b"x" * 9999, 1))
                       for _ in range(3)]  # fmt: skip
            for connection in hostile:
                assert b"401" in self.answer(connection)
            image = encode_png(torch.zeros(3, 32, 32))
            assert b"200" in self.answer(
                self.send(address, "/predict", token, chunked(image, SMALL_CHUNK))
            )
        assert len(parsed) <= 5 * CHUNKS_AT_ONCE  # the first and the second turn wait for nothing

    @pytest.mark.parametrize("size", [1, 100, 100_000])
    def test_of_any_size_are_read(self, folder, service, scenario, size) -> None:
        token, image = Tokens(folder).add("me", "predict"), encode_test_images(scenario)[0]
        with serve_at_port(service) as url:
            address = ("127.0.0.1", int(url.rpartition(":")[2].strip("/")))
            body = chunked(image, size)
            assert len(image) > 2 * CHUNKS_AT_ONCE
            assert b"200" in self.answer(self.send(address, "/predict", token, body))

    @pytest.mark.parametrize("lines", [b"a: b\r\n", b"a:\r\n" * 7000])
    def test_lines_behind_the_last_one_are_refused(self, folder, service, lines) -> None:
        token = Tokens(folder).add("me", "predict")
        with serve_at_port(service) as url:
            address = ("127.0.0.1", int(url.rpartition(":")[2].strip("/")))
            image = encode_png(torch.zeros(3, 32, 32))
            body = chunked(image, SMALL_CHUNK).removesuffix(b"\r\n") + lines + b"\r\n"
            assert b"400" in self.answer(self.send(address, "/predict", token, body))


class TestHeads:
    def test_a_long_query_is_refused(self, client) -> None:
        assert client.get("/?" + "a=b&" * 200).status_code == 200
        assert client.get("/?" + "a=b&" * 300).status_code == 400

    @pytest.mark.parametrize(
        ("headers", "code"),
        [
            (b"a:\r\n" * (MAX_HEADERS - 5), b"200"),
            (b"a:\r\n" * 6000, b"400"),
            (b"a: " + b"x" * 30_000 + b"\r\n", b"200"),
            (b"a: " + b"x" * 40_000 + b"\r\n", b"400"),
        ],
        ids=["few", "many", "long", "too-long"],
    )
    @pytest.mark.parametrize("first", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
    def test_many_or_long_headers_are_refused(self, service, headers, code, first) -> None:
        head = b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + headers
        with serve_at_port(service) as url:
            address = ("127.0.0.1", int(url.rpartition(":")[2].strip("/")))
            with socket.create_connection(address, timeout=30) as connection:
                connection.sendall(first + head + b"\r\n")
                answer = b""
                while part := connection.recv(10_000):
                    answer += part
        assert answer.rpartition(b"HTTP/1.1 ")[2][:3] == code
        assert answer.count(b"HTTP/1.1 ") == 1 + bool(first)


class TestPace:
    def test_an_operator_waits_less_than_a_second_in_a_flood_of_probes(self, service) -> None:
        limits = build_app(service).state.limits
        waits = [limits.probes.delay("10.0.0.7", now=0.0) for _ in range(10_000)]
        assert max(waits[:99]) == 0.0
        assert 0.5 <= max(waits) < 0.9

    def test_refused_requests_and_pages_wait_and_others_do_not(self, folder, service) -> None:
        keys: dict[str, list[str]] = {"reads": [], "refusals": [], "probes": []}

        class Recorder:
            def __init__(self, name: str) -> None:
                self.name = name

            def delay(self, key: str, **others: object) -> float:
                keys[self.name].append(key)
                return 0.0

        app = build_app(service)
        for name in keys:
            setattr(app.state.limits, name, Recorder(name))
        client = TestClient(app, "http://127.0.0.1", client=("10.0.0.7", 1))
        for path in ("/health", "/ready", "/", "/openapi.json", "/status", "/nowhere"):
            client.get(path)
        assert keys == dict.fromkeys(keys, ["10.0.0.7"] * 2)
        client.headers["Authorization"] = f"Bearer {Tokens(folder).add('eve', 'predict')}"
        codes = [client.post(path, content=b"x", headers={"Content-Type": kind}).status_code
                 for path, kind in (("/predict", "image/png"), ("/predict", "text/x"),
                                    ("/freeze", "text/x"))]  # fmt: skip
        assert codes == [400, 415, 403]
        assert keys["refusals"][2:] == ["eve"] * 3  # not of others at the same address
