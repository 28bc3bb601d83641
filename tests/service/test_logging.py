"""The log of a service: one line per request, warnings of the writer, text or JSON."""

import base64
import errno
import json
import logging
import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from dosapp import Client
from dosapp.drills.service_process import encode_test_images
from dosapp.errors import InputError
from dosapp.learner.learner import Learner
from dosapp.service.log_config import UNHEARD, configure_logging
from dosapp.service.service import open_service
from dosapp.service.settings import ServiceSettings
from dosapp.service.tokens import Tokens

pytest.importorskip("fastapi")
from starlette.testclient import TestClient

from dosapp.service.http.app import build_app
from support.services import wait_until

QUICK = {"adapt_batch_size": 8, "interval": 1, "threads": 1, "batch_wait": 0.0,
         "token": False, "require_canary": False, "canary_share": 0.0}  # fmt: skip


@pytest.fixture
def images(saved_learner) -> list[bytes]:
    return encode_test_images(saved_learner[1])[:8]


@pytest.fixture
def log(caplog):
    """The lines of a logger at a level, from INFO on."""
    caplog.set_level("INFO", "dosapp.service")

    def lines(name: str, level: str) -> list[str]:
        return [
            record.getMessage()
            for record in caplog.records
            if record.name == f"dosapp.service.{name}" and record.levelname == level
        ]

    return lines


def run(folder: Path, **changes: object):
    return open_service(folder, ServiceSettings.parse({**QUICK, **changes}))


def connect(service, **headers: str) -> TestClient:
    return TestClient(
        build_app(service), "http://127.0.0.1", client=("127.0.0.1", 1), headers=headers
    )


def files(images: list[bytes]):
    return [("images", (f"{n}.png", data)) for n, data in enumerate(images)]


class TestRequests:
    def test_one_line_per_request(self, folder, images, log, caplog) -> None:
        with run(folder, adapt=False) as service:
            client = connect(service)
            responses = [client.post("/predict", files=files(images)), client.get("/nothing")]
        records = [r for r in caplog.records if r.name == "dosapp.service.http"]
        assert len(records) == len(log("http", "INFO")) == 2
        for record, response in zip(records, responses, strict=True):
            fields = record.fields
            assert fields["request_id"] == response.headers["x-request-id"]
            assert fields["milliseconds"] > 0
            line = "{method} {path} {status} {milliseconds} ms {caller} {request_id}"
            assert record.getMessage() == line.format(**fields)
        assert [[r.fields[name] for name in ("method", "path", "status", "caller")]
                for r in records] == [
            ["POST", "/predict", 200, "localhost"], ["GET", "/nothing", 404, "-"]]  # fmt: skip

    def test_bodies_tokens_and_query_strings_are_not_logged(
        self, folder, images, log, caplog
    ) -> None:
        token = Tokens(folder).add("alice", "teach")
        with run(folder, token=True) as service:
            client = connect(service, Authorization=f"Bearer {token}")
            text = base64.b64encode(images[0]).decode()
            client.post("/predict?top=3&dtype=secret", json={"images": [text]})
            client.post(
                "/correct", json={"image": text, "label": "hidden class", "new_class": True}
            )
            client.post("/predict?shape=secret", content=b"hidden bytes")
        assert [line.split()[-2] for line in log("http", "INFO")] == ["alice"] * 3
        for hidden in (token, "secret", "top=3", text[:40], "hidden"):
            assert hidden not in caplog.text

    def test_a_path_cannot_break_a_line(self, folder, log) -> None:
        with run(folder) as service:
            connect(service).get("/x%0Aforged%20line" + "y" * 1000)
        (line,) = log("http", "INFO")
        assert line.startswith("GET /x%0Aforged%20line")
        assert "\n" not in line
        assert len(line) < 400


class TestRequestIds:
    def test_a_valid_id_is_kept(self, folder, log) -> None:
        with run(folder) as service:
            client = connect(service)
            for path in ("/health", "/", "/nothing", "/docs", "/docs/files/swagger-ui.css"):
                answer = client.get(path, headers={"X-Request-Id": "trace-1.a_B"})
                assert answer.headers["x-request-id"] == "trace-1.a_B"
        assert all(line.endswith(" trace-1.a_B") for line in log("http", "INFO"))

    @pytest.mark.parametrize("given", ["", "two words", "a" * 129, "é", 'quote"', "semi;colon"])
    def test_an_invalid_id_is_replaced(self, folder, given) -> None:
        with run(folder) as service:
            client = connect(service)
            ids = [client.get("/health", headers={b"X-Request-Id": given.encode()}).headers
                   ["x-request-id"] for _ in range(2)]  # fmt: skip
        assert all(len(each) == 32 and each.isalnum() for each in ids)
        assert ids[0] != ids[1]

    def test_answers_of_the_limits_have_one_too(self, folder) -> None:
        with run(folder, max_body=10) as service:
            answer = connect(service).post(
                "/predict", content=bytes(11), headers={"X-Request-Id": "mine"}
            )
        assert answer.status_code == 413
        assert answer.headers["x-request-id"] == answer.json()["request_id"] == "mine"


class TestWriter:
    def test_versions_and_refused_intervals(self, folder, images, log) -> None:
        with run(folder, max_disagreement=1e-9, max_refusals=1, max_skew=1.0) as service:
            assert service.rollback(1, "alice")[0] == 2
            adapt = Learner.adapt
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    Learner, "adapt", lambda *args: replace(adapt(*args), disagreement=0.5)
                )
                connect(service).post("/predict", files=files(images))
                wait_until(lambda: service.writer.frozen)
        assert log("writer", "INFO") == ["version 2: rolled back to version 1"]
        refused, frozen = log("writer", "WARNING")
        reason = "the experts disagree on 50% of the stream"
        assert refused == f"interval refused, version 2 stays: {reason}"
        assert frozen.startswith("adaptation is frozen: refused 1 intervals in a row")

    def test_failed_sessions(self, folder, images, log, monkeypatch) -> None:
        def fail(*_: object, **options: object) -> None:
            raise InputError("it went wrong")

        monkeypatch.setattr(Learner, "training_steps", fail)
        with run(folder) as service:
            client = connect(service)
            job = client.post("/learn", data={"name": "owl"}, files=files(images)).json()
            service.job(job["id"]).ended.wait(60)
        assert log("writer", "WARNING") == [
            f"session {job['id']} of localhost failed: it went wrong"
        ]

    def test_storage_trouble(self, folder, images, log, monkeypatch) -> None:
        def fail(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with run(folder, max_skew=1.0, max_disagreement=1.0) as service:
            client = connect(service)
            monkeypatch.setattr(os, "fsync", fail)
            client.post("/predict", files=files(images))
            wait_until(lambda: service.writer.last_error)
            client.post("/freeze")
            client.post("/rollback", json={"version": 1})
            monkeypatch.undo()
        starts = {line.partition(" the disk of ")[0] for line in log("writer", "WARNING")}
        assert starts == {"not saved: 1 step on the stream:",
                          "it is frozen, but a restart would not know that:"}  # fmt: skip
        (error,) = log("http", "ERROR")
        assert error.startswith("StorageError in request ")
        assert " 507 " in log("http", "WARNING")[0]


class TestFormats:
    @pytest.fixture
    def configure(self, capsys):
        """Configure the loggers as `dosapp serve` does; return a function that reads the lines."""
        loggers = [logging.getLogger(name) for name in ("", "dosapp.service", *UNHEARD)]
        before = [(each, each.handlers, each.level) for each in loggers]

        def read_lines() -> list[str]:
            return capsys.readouterr().err.splitlines()

        def configure(**settings: object):
            configure_logging(ServiceSettings.parse(settings))
            return read_lines

        yield configure
        logging.captureWarnings(False)
        for logger, handlers, level in before:
            logger.handlers = handlers
            logger.setLevel(level)

    def test_warnings_of_pillow_are_left_out(self, configure) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            read_lines = configure()
            for name in ("PIL.TiffImagePlugin", "dosapp.data.folder"):
                warnings.warn_explicit(f"from {name}", UserWarning, "x.py", 1, module=name)
            logging.getLogger("PIL.TiffImagePlugin").warning("more samples than can be decoded")
            [line] = [line for line in read_lines() if line.startswith("20")]
        assert "from dosapp.data.folder" in line

    def test_every_line_is_json_and_a_damaged_form_adds_none(self, folder, configure) -> None:
        read_lines = configure(log_format="json")
        with run(folder) as service:
            form = {"Content-Type": "multipart/form-data; boundary=12345678"}
            assert connect(service).post("/predict", content=b"no", headers=form).status_code == 400
            logging.getLogger("asyncio").warning("socket.send() raised exception.")
        lines = [json.loads(line) for line in read_lines()]
        assert [line["logger"] for line in lines] == ["dosapp.service.http", "asyncio"]

    def test_json_lines(self, folder, configure, monkeypatch) -> None:
        read_lines = configure(log_format="json")
        with run(folder) as service:
            client = connect(service)
            client.get("/health", headers={"X-Request-Id": "one"})
            monkeypatch.setattr(service, "status", lambda: 1 / 0)
            client.get("/status")
        lines = [json.loads(line) for line in read_lines()]
        assert lines[0] | {"time": "", "milliseconds": 0} == {
            "time": "", "level": "info", "logger": "dosapp.service.http", "milliseconds": 0,
            "message": lines[0]["message"], "method": "GET", "path": "/health", "status": 200,
            "caller": "-", "request_id": "one",
        }  # fmt: skip
        error, request = lines[1:]
        assert (error["level"], request["level"], request["status"]) == ("error", "warning", 500)
        assert "ZeroDivisionError" in error["traceback"]
        assert request["request_id"] in error["message"]

    def test_text_lines(self, folder, configure) -> None:
        read_lines = configure()
        with run(folder) as service:
            connect(service).get("/health")
        time, level, name, rest = read_lines()[0].split(" ", 3)
        assert len(time) == len("2026-01-31T12:00:00.000+00:00")
        assert (level, name) == ("INFO", "dosapp.service.http:")
        assert rest.startswith("GET /health 200 ")

    def test_a_level_hides_lines_below_it(self, folder, configure) -> None:
        read_lines = configure(log_level="warning")
        with run(folder) as service:
            connect(service).get("/health")
        assert read_lines() == []

    def test_a_waiting_client_asks_ever_less_often(self, monkeypatch) -> None:
        """Each question is a line of the log."""
        states, pauses = iter(["learning"] * 30 + ["done"]), list[float]()
        client = Client("http://127.0.0.1:1")
        monkeypatch.setattr(client, "_request", lambda *_, **__: {"id": "x", "state": next(states)})
        monkeypatch.setattr("dosapp.service.client.time.sleep", pauses.append)
        assert client.learn()["state"] == "done"
        assert pauses[0] == 0.1
        assert pauses == sorted(pauses)
        assert pauses[-1] == 2

    def test_unknown_formats_and_levels_are_input_errors(self) -> None:
        for name, value in (("log_format", "xml"), ("log_level", "loud")):
            with pytest.raises(InputError, match=f"{name} is '{value}'"):
                ServiceSettings.parse({name: value})
