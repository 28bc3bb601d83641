"""Requests that cost a service far more than their sender, and what bounds each."""

import asyncio
import fcntl
import io
import os
import socket
import stat
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from dosapp.data.preprocess import Preprocess
from dosapp.drills.service_process import encode_test_images
from dosapp.errors import BusyError, InputError, TooLargeError
from dosapp.runtime.files import lock_folder, take_turn
from dosapp.runtime.process_memory import peak_memory
from dosapp.service.audit import Audit
from dosapp.service.guards import Guard
from dosapp.service.service import open_service
from dosapp.service.settings import ServiceSettings
from dosapp.service.stream import StreamSample
from dosapp.service.tokens import Tokens
from dosapp.service.uploads import BYTES_PER_PIXEL, UploadDecoder, count_pixels

pytest.importorskip("fastapi")
from starlette.datastructures import Headers
from starlette.testclient import TestClient

from dosapp.service.http.app import build_app
from dosapp.service.http.limits import Limits
from support.services import serve_at_port, wait_until

DECODE = """
import io, sys
from PIL import Image
from dosapp.runtime.process_memory import peak_memory
Image.open(io.BytesIO(sys.stdin.buffer.read())).load()
print(peak_memory())
"""
QUICK = {"threads": 1, "batch_wait": 0.0, "adapt": False}


@pytest.fixture
def service(folder):
    with open_service(folder, ServiceSettings.parse(QUICK)) as service:
        yield service


@pytest.fixture
def client(folder, service) -> TestClient:
    head = {"Authorization": f"Bearer {Tokens(folder).add('me', 'teach')}"}
    return TestClient(build_app(service), "http://127.0.0.1", headers=head)


@pytest.fixture
def decoder() -> UploadDecoder:
    size = {"shortest_edge": 32}
    return UploadDecoder(Preprocess(32, size, 3), ServiceSettings(max_session_images=2))


def sample(caller: str) -> StreamSample:
    return StreamSample(torch.zeros(3, 4, 4), "fox", 0.9, 0.0, caller)


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def webp_of_tables(side: int) -> bytes:
    """A lossless WebP with five codes for each 4 × 4 pixels: 20 bits, and 5.7 kB of memory."""

    def write(number: int, count: int) -> str:
        return f"{number:0{count}b}"[::-1]

    def code(kept: set[int], lengths: str) -> str:
        """A code of 256 symbols of 8 bits, told by the lengths of the codes of these lengths."""
        order = (17, 18, 0, 1, 2, 3, 4, 5, 16, 6, 7, 8)
        return "0" + write(8, 4) + "".join("100" if n in kept else "000" for n in order) + lengths

    blocks, one = range((side // 4) ** 2), "1000"  # a code of one symbol
    bits = "".join([
        write(0x2F, 8), write(side - 1, 14), write(side - 1, 14), write(0, 4),
        "00", "1" + write(0, 3), "0",  # no transform or cache; which codes 4 × 4 pixels have
        code({0, 8}, "0" + 256 * "1" + 24 * "0"), code({8}, "0"), 3 * one,
        *(f"{n & 255:08b}{n >> 8:08b}" for n in blocks), 5 * one * len(blocks), 64 * "0",
    ])  # fmt: skip
    bits += -len(bits) % 16 * "0"
    body = int(bits[::-1], 2).to_bytes(len(bits) // 8, "little")
    head = struct.pack("<4sI4s4sI", b"RIFF", len(body) + 12, b"WEBP", b"VP8L", len(body))
    return head + body


class TestAnswers:
    def test_one_that_is_not_read_is_given_up(self, folder) -> None:
        """Also by a sender without a token: the page's files are megabytes."""
        settings = ServiceSettings.parse({**QUICK, "body_timeout": 0.3})
        with open_service(folder, settings) as service, serve_at_port(service) as url:
            address = ("127.0.0.1", int(url.rpartition(":")[2].strip("/")))
            path = next(
                path
                for path in ("/docs/files/swagger-ui-bundle.js", "/docs/files/redoc.standalone.js")
                if TestClient(build_app(service), url).get(path).status_code == 200
            )
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect(address)
            request = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            connection.sendall(12 * request)  # more than the buffers of the system hold

            def is_closed() -> bool:
                try:
                    connection.sendall(b"x")
                except OSError:
                    return True
                return False

            wait_until(is_closed)
            connection.close()

    def test_after_a_body_only_the_end_of_the_connection_is_awaited(self) -> None:
        """A file that is read slowly is no slow body: there is no time limit for it."""
        messages = iter([({"type": "http.request", "body": b"", "more_body": False}, 0.0),
                         ({"type": "http.disconnect"}, 0.3)])  # fmt: skip
        received = []

        async def receive():
            message, delay = next(messages)
            await asyncio.sleep(delay)
            return message

        async def app(scope, receive, send):
            received.extend([await receive(), await receive()])

        scope = {"type": "http", "query_string": b"", "headers": [], "state": {}}
        limits = Limits(ServiceSettings(body_timeout=0.1))
        asyncio.run(limits.middleware(app)(scope, receive, None))
        assert received[1]["type"] == "http.disconnect"

    def test_the_number_of_scores_is_limited(self, client, service, scenario, monkeypatch) -> None:
        monkeypatch.setattr("dosapp.service.http.routes.MAX_SCORES", 12)
        (image, *_) = encode_test_images(scenario)
        known = len(service.classes)
        files = [("images", (f"{n}.png", image)) for n in range(13)]
        refused = client.post(f"/predict?top={known}", files=files)
        assert refused.status_code == 413
        assert f"13 images with {known} classes each" in refused.json()["error"]
        assert client.post("/predict?top=1", files=files[:12]).status_code == 200
        assert client.post("/predict?top=1000", files=files[:1]).status_code == 200


class TestForms:
    @pytest.mark.parametrize(
        "given",
        ["boundary=a", "Boundary=a", "boundary =a", "xboundary=12345678; boundary=a",
         "boundary=12345678; boundary=a"],
    )  # fmt: skip
    def test_a_short_boundary_is_refused(self, client, given) -> None:
        head = {"Content-Type": f"multipart/form-data; {given}"}
        answer = client.post("/predict", content=b"--a\r\n" * 1000, headers=head)
        assert answer.status_code == 400
        assert "give at least 8 characters" in answer.json()["error"]

    def test_the_time_that_parsing_takes_is_counted_for_the_caller(self, client, scenario) -> None:
        spent = []

        class Recorder:
            def delay(self, key: str, count: float = 1) -> float:
                spent.append((key, count))
                return 0.0

        client.app.state.limits.parsing = Recorder()
        (image, *_) = encode_test_images(scenario)
        answer = client.post("/predict", files=[("images", ("x.png", image * 200))])
        assert answer.status_code == 200
        assert {key for key, _ in spent} == {"me"}
        assert len(spent) > 1
        assert all(count > 0 for _, count in spent)


class TestImages:
    def test_a_tiff_with_images_inside_is_refused(self, decoder) -> None:
        """A JPEG inside has a size of its own, which no tag tells."""
        image = Image.new("RGB", (64, 64), "red")
        with pytest.raises(InputError, match="TIFF with compression 7; save it as PNG or JPEG"):
            decoder.decode_image(encode(image, "TIFF", compression="jpeg"))
        for compression in ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits"):
            decoder.decode_image(encode(image, "TIFF", compression=compression))

    def test_all_tiles_of_a_tiff_count(self) -> None:
        image = SimpleNamespace(width=100, height=100, format="TIFF", tag_v2={322: 16, 323: 4096})
        assert count_pixels(image) == 2 * (7 * 16) * 4096

    def test_a_lossless_webp_counts_the_memory_that_its_tables_may_take(self, decoder) -> None:
        side, codes = 64, 2 * 20_600 * 16**2 // 5
        image, transparent = (Image.effect_noise((side, side), 80).convert(m) for m in ("L", "LA"))
        transparent.putalpha(image)
        assert decoder.check_image(encode(image, "WEBP", lossless=True)).pixels == 3 * 64**2 + codes
        assert decoder.check_image(encode(transparent, "WEBP")).pixels == 3 * 64**2 + codes
        assert decoder.check_image(encode(image, "WEBP")).pixels == 3 * 64**2
        plain = Image.new("RGBA", (1000, 1000), (255, 0, 0, 9))  # whose alpha takes a few bytes
        assert decoder.check_image(encode(plain, "WEBP")).pixels < 3_200_000

    def test_a_jpeg_of_several_scans_counts_its_coefficients(self, decoder) -> None:
        """Of a progressive one, and of one with a scan for each colour."""
        image = Image.effect_noise((64, 48), 80).convert("RGB")
        for subsampling, coefficients in ((0, 6), (2, 3)):  # bytes of a pixel
            for progressive, count in ((False, 0), (True, 64 * 48 * coefficients // 5)):
                data = encode(image, "JPEG", subsampling=subsampling, progressive=progressive)
                assert decoder.check_image(data).pixels == 64 * 48 + count
        data = encode(image, "JPEG", subsampling=0)
        start = data.index(b"\xff\xda")
        separate = data[:start] + b"\xff\xda\x00\x08\x01\x01\x00" + data[start + 11 :]
        assert decoder.check_image(separate).pixels == 64 * 48 + 64 * 48 * 6 // 5

    def test_a_webp_takes_no_more_memory_than_it_counts(self, decoder) -> None:
        data = webp_of_tables(380)
        if peak_memory() is None:
            pytest.skip("the system does not report memory")
        before, after = (
            float(subprocess.run([sys.executable, "-c", DECODE], input=given, check=True,
                                 capture_output=True).stdout) for given in (webp_of_tables(4), data)
        )  # fmt: skip
        counted = decoder.check_image(data).pixels * BYTES_PER_PIXEL / 1e6
        assert 30 < after - before < counted / 2

    def test_a_webp_whose_tables_might_fill_the_memory_is_refused(self, decoder) -> None:
        with pytest.raises(TooLargeError, match=r"1024 × 1024 .* save it as PNG or baseline JPEG"):
            decoder.decode_image(webp_of_tables(1024))


class TestArchives:
    def test_many_entries_are_refused_before_they_are_read(self, decoder) -> None:
        with pytest.raises(TooLargeError, match="too many files; at most 2 are accepted"):
            decoder.read_zip(b"PK\x01\x02" * 1005)


class TestGuard:
    def test_a_clean_interval_does_not_forgive_all_that_was_refused(self) -> None:
        """Otherwise two harmful intervals and a clean one could go on for ever."""
        guard, out = Guard(ServiceSettings(max_refusals=3)), []
        guard.choose_trusted([sample("honest"), sample("hostile")], 5)
        for _ in range(2):
            out += guard.refuse(["hostile"]) + guard.refuse(["hostile"])
            guard.accept(["hostile", "honest"])
        assert out == ["hostile"]


class TestHeaders:
    def test_two_lengths_of_a_body_are_refused(self) -> None:
        headers = Headers({"content-length": "4", "transfer-encoding": "chunked"})
        with pytest.raises(InputError, match="not both"):
            Limits(ServiceSettings()).check_length(headers)


class TestFolder:
    def test_another_user_cannot_hold_the_lock(self, tmp_path) -> None:
        with lock_folder(tmp_path):
            assert stat.S_IMODE((tmp_path / ".lock").stat().st_mode) == 0o600

    def test_who_may_read_the_folder_cannot_keep_a_token(self, tmp_path) -> None:
        tokens = Tokens(tmp_path)
        tokens.add("me", "predict")
        descriptor = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            tokens.remove("me")
        finally:
            os.close(descriptor)

    def test_a_turn_that_does_not_end_is_an_error(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr("dosapp.runtime.files.TURN_WAIT", 0.05)
        with take_turn(tmp_path):
            pass
        assert stat.S_IMODE((tmp_path / ".tokens.lock").stat().st_mode) == 0o600
        descriptor = os.open(tmp_path / ".tokens.lock", os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with pytest.raises(BusyError, match=r"locked for 0\.05 seconds"):
                Tokens(tmp_path).add("me", "predict")
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            with take_turn(tmp_path):
                pass
        finally:
            os.close(descriptor)

    def test_a_nested_line_of_the_audit_log_is_left_out(self, tmp_path) -> None:
        audit = Audit(tmp_path)
        audit.write("froze", "me", {})
        with (tmp_path / "audit.jsonl").open("a") as file:
            file.write("[" * 200_000 + "\n")
        assert [entry["what"] for entry in audit.last()] == ["froze"]
