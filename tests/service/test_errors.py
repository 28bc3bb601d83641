"""Errors by kind: the status code, the body and the request id of each."""

import asyncio
import errno
import io
import os
import zipfile

import numpy as np
import pytest
from PIL import Image

from dosapp.drills.service_process import encode_test_images
from dosapp.errors import (
    BusyError,
    CorruptRecordError,
    DivergedError,
    DosappError,
    InputError,
    ReadOnlyError,
    StorageError,
    TooLargeError,
)
from dosapp.service.client import Client, InvalidRequestError, RequestError, _zip_session
from dosapp.service.service import open_service
from dosapp.service.settings import ServiceSettings

pytest.importorskip("fastapi")
from starlette.testclient import TestClient

from dosapp.service.http.app import STATUS_CODES, build_app
from support.services import save_trained_learner, serve_at_port

OPEN = ServiceSettings(token=False)


class OtherError(DosappError):
    """A kind that the table does not list."""


@pytest.fixture(scope="module")
def saved_learner(loaded_tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "learner"
    return folder, save_trained_learner(loaded_tiny, folder)


@pytest.fixture
def service(folder):
    settings: ServiceSettings = ServiceSettings.parse(
        {"threads": 1, "max_images": 1, "token": False}
    )
    with open_service(folder, settings) as service:
        yield service


@pytest.fixture
def client(service) -> TestClient:
    return connect(service)


def connect(service) -> TestClient:
    return TestClient(build_app(service), "http://127.0.0.1", client=("127.0.0.1", 1))


def check(response, code: int, message: str) -> None:
    assert response.status_code == code, response.text
    body = response.json()
    assert message in body["error"]
    assert body == {"error": body["error"], "request_id": response.headers["x-request-id"]}


class TestRealErrors:
    def test_invalid_input_is_a_400(self, client) -> None:
        check(client.post("/rollback", json={"version": 99}), 400, "has no version 99")

    def test_an_unknown_parameter_is_a_400(self, client, saved_learner) -> None:
        """`?lern=false` must not let the service adapt to the image all the same."""
        (image, *_) = encode_test_images(saved_learner[1])
        headers = {"Content-Type": "image/png"}
        answer = client.post("/predict?lern=false", content=image, headers=headers)
        check(answer, 400, "unknown parameter 'lern'; did you mean 'learn'?")
        check(client.post("/freeze?now=1"), 400, "unknown parameter 'now'; this route has none")

    def test_zero_epochs_are_not_left_out_by_the_client(self, folder) -> None:
        images = {"fox": [np.zeros((32, 32, 3), dtype=np.uint8)]}
        with (
            open_service(folder, OPEN) as service,
            serve_at_port(service) as url,
            Client(url) as client,
            pytest.raises(InputError, match="epochs"),
        ):
            client.learn(images, epochs=0)

    def test_too_large_input_is_a_413(self, client, saved_learner) -> None:
        images = encode_test_images(saved_learner[1])[:2]
        files = [("images", (f"{n}.png", data)) for n, data in enumerate(images)]
        check(
            client.post("/predict", files=files),
            413,
            "the form has more than 1 file, which is the limit",
        )

    def test_a_busy_service_is_a_429(self, service, client, saved_learner) -> None:
        (image, *_) = encode_test_images(saved_learner[1])
        service.reader.waiting = 10**6  # as if so many waited
        headers = {"Content-Type": "image/png"}
        response = client.post("/predict", content=image, headers=headers)
        service.reader.waiting = 0
        check(response, 429, "images wait for an answer")
        assert response.headers["retry-after"] == "1"

    def test_a_replica_is_a_409(self, folder) -> None:
        with open_service(folder, OPEN, follow=True) as replica:
            check(connect(replica).post("/freeze"), 409, "this replica only reads")

    def test_a_full_disk_is_a_507_and_counted_as_one(self, service, client, monkeypatch) -> None:
        """An alert on 5xx must fire."""

        def fail(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", fail)
        body = {"name": service.classes[0], "to": "owl"}
        check(client.post("/classes/rename", json=body), 507, "is full")
        check(client.post("/rollback", json={"version": 1}), 507, "is full")
        monkeypatch.undo()
        assert service.version == 1
        text = client.get("/metrics").text
        assert 'dosapp_requests_total{route="/classes/rename",status="507"} 1.0' in text
        assert client.post("/classes/rename", json=body).json() == {"version": 2}

    def test_a_corrupt_version_is_a_500(self, service, client, folder) -> None:
        assert client.post("/rollback", json={"version": 1}).json() == {"version": 2}
        path = folder / "versions" / "000002.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        check(client.get("/versions/2"), 500, "000002.safetensors")
        check(client.post("/rollback", json={"version": 2}), 500, "000002.safetensors")

    def test_unknown_paths_and_methods_have_the_same_body(self, client) -> None:
        check(client.get("/nothing"), 404, "Not Found")
        check(client.put("/predict"), 405, "Method Not Allowed")
        check(client.get("/jobs/none"), 404, "there is no job 'none'")
        check(client.get("/versions/abc"), 422, "number: ")


class TestTable:
    @pytest.mark.parametrize(
        ("kind", "code"),
        [
            (InputError, 400),
            (TooLargeError, 413),
            (BusyError, 429),
            (ReadOnlyError, 409),
            (StorageError, 507),
            (CorruptRecordError, 500),
            (DivergedError, 500),
            (DosappError, 500),
            (OtherError, 500),
        ],
    )
    def test_every_kind_has_its_code(self, service, client, monkeypatch, kind, code) -> None:
        def fail(*_: object) -> int:
            raise kind("it went wrong")

        monkeypatch.setattr(service, "rollback", fail)
        check(client.post("/rollback", json={"version": 1}), code, "it went wrong")

    def test_every_kind_is_in_the_table(self) -> None:
        kinds = {
            kind for kind in DosappError.__subclasses__() if kind.__module__ == "dosapp.errors"
        }
        assert kinds | {DosappError, TooLargeError} == set(STATUS_CODES)

    def test_an_unexpected_error_is_a_500_without_its_details(
        self, service, client, monkeypatch, caplog
    ) -> None:
        monkeypatch.setattr(service, "rollback", lambda *_: 1 / 0)
        response = client.post("/rollback", json={"version": 1})
        check(response, 500, "internal error")
        assert "ZeroDivisionError" in caplog.text  # the traceback
        assert f"unexpected error in request {response.headers['x-request-id']}" in caplog.text

    def test_a_client_that_has_gone_is_not_an_error_of_the_service(self, service, caplog) -> None:
        sent = []

        async def send(message) -> None:
            sent.append(message)

        async def receive():
            return {"type": "http.disconnect"}

        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"image/png")]
        scope = {"type": "http", "method": "POST", "path": "/predict", "raw_path": b"/predict",
                 "query_string": b"", "headers": headers, "client": ("127.0.0.1", 1),
                 "http_version": "1.1", "scheme": "http", "root_path": "",
                 "server": ("127.0.0.1", 80)}  # fmt: skip
        caplog.set_level("INFO", "dosapp.service")
        asyncio.run(build_app(service)(scope, receive, send))
        assert sent == []
        assert [r.fields["status"] for r in caplog.records if hasattr(r, "fields")] == [499]


def test_the_client_takes_one_image_or_many_of_any_kind(folder, tmp_path) -> None:
    pixels = np.zeros((40, 30, 3), dtype=np.uint8)
    pixels[..., 0] = 200
    image, path = Image.fromarray(pixels), tmp_path / "red.png"
    image.save(path)
    given = [str(path), path, path.read_bytes(), image, pixels]
    with (
        open_service(folder, OPEN) as service,
        serve_at_port(service) as url,
        Client(url) as client,
    ):

        def labels(images: object) -> list[str]:
            return [p["label"] for p in client.predict(images, learn=False)["predictions"]]

        [expected] = labels([path])
        assert [labels(one) for one in given] == [[expected]] * 5
        assert labels(np.stack([pixels] * 2)) == [expected] * 2
        assert labels(given) == [expected] * 5
        for wrong, message in [
            (pixels / 255, r"an array is float64 \[40, 30, 3\]; give images as uint8"),
            ([7], "an image is a int; give a path, bytes"),
            ("fox.jpg", "'fox.jpg' cannot be read"),
        ]:
            with pytest.raises(InputError, match=message):
                client.predict(wrong)


def test_a_folder_of_classes_is_sent_with_the_names_of_its_images(tmp_path) -> None:
    (tmp_path / "fox").mkdir()
    for name in ("b.JPG", "a.png", ".DS_Store", "._a.png", "notes.txt", "c.heic"):
        (tmp_path / "fox" / name).write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"1 \.heic file; convert"):
        sent = _zip_session(tmp_path)
    assert zipfile.ZipFile(io.BytesIO(sent)).namelist() == ["fox/a.png", "fox/b.JPG"]
    with Image.new("RGB", (4, 4)) as image:
        sent = _zip_session({"fox": [image, image]})
    assert zipfile.ZipFile(io.BytesIO(sent)).namelist() == ["fox/00000.png", "fox/00001.png"]


def test_the_client_raises_input_errors_for_wrong_requests_only(folder) -> None:
    """And has the request id for the log."""
    with (
        open_service(folder, OPEN) as service,
        serve_at_port(service) as url,
        Client(url) as client,
    ):
        with pytest.raises(InvalidRequestError, match="has no version 99") as caught:
            client.rollback(99)
        assert isinstance(caught.value, InputError)
        assert (caught.value.code, len(caught.value.request_id)) == (400, 32)

        def fail(*_: object) -> int:
            raise StorageError("the disk is full")

        service.rollback = fail
        with pytest.raises(RequestError, match="the disk is full") as caught:
            client.rollback(1)
        assert not isinstance(caught.value, InputError)
        assert caught.value.code == 507
        with (
            open_service(folder, OPEN, follow=True) as replica,
            serve_at_port(replica) as address,
            Client(address) as reader,
            pytest.raises(RequestError) as caught,
        ):
            reader.rollback(1)
        assert not isinstance(caught.value, InputError)
        assert caught.value.code == 409
