"""Errors by kind: the status code, the body and the request id of each."""

import asyncio
import errno
import os

import pytest

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
from dosapp.service.client import Client, InvalidRequestError, RequestError
from dosapp.service.service import open_service
from dosapp.service.settings import ServiceSettings

pytest.importorskip("fastapi")
from starlette.testclient import TestClient

from dosapp.service.http.app import STATUS_CODES, build_app
from support.services import save_trained_learner, serve_at_port


class OtherError(DosappError):
    """A kind that the table does not list."""


@pytest.fixture(scope="module")
def saved_learner(loaded_tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "learner"
    return folder, save_trained_learner(loaded_tiny, folder)


@pytest.fixture
def service(folder):
    settings: ServiceSettings = ServiceSettings.parse({"threads": 1, "max_images": 1})
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

    def test_too_large_input_is_a_413(self, client, saved_learner) -> None:
        images = encode_test_images(saved_learner[1])[:2]
        files = [("images", (f"{n}.png", data)) for n, data in enumerate(images)]
        check(client.post("/predict", files=files), 413, "the request has 2 images")

    def test_a_busy_service_is_a_429(self, service, client, saved_learner) -> None:
        (image, *_) = encode_test_images(saved_learner[1])
        service.reader.waiting = 10**6  # as if so many waited
        headers = {"Content-Type": "image/png"}
        response = client.post("/predict", content=image, headers=headers)
        service.reader.waiting = 0
        check(response, 429, "images wait for an answer")
        assert response.headers["retry-after"] == "1"

    def test_a_replica_is_a_409(self, folder) -> None:
        with (
            open_service(folder, follow=True) as replica,
            serve_at_port(replica) as address,
            Client(address) as reader,
            pytest.raises(RequestError) as caught,
        ):
            reader.rollback(1)
        assert not isinstance(caught.value, InputError)
        assert caught.value.code == 409
