"""The interface's description: complete, true, and robust against generated requests."""

import base64
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

pytest.importorskip("fastapi")
pytest.importorskip("schemathesis")
import jsonschema
import schemathesis
from starlette.testclient import TestClient

from dosapp.drills.service_process import encode_test_images, make_small_learner, zip_session
from dosapp.service.http.app import build_app
from dosapp.service.service import open_service
from dosapp.service.settings import ServiceSettings
from dosapp.service.tokens import Tokens
from support.services import save_trained_learner, wait_until


@pytest.fixture(scope="module")
def folder(loaded_tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("openapi") / "learner"
    return folder, save_trained_learner(loaded_tiny, folder)


class Interface:
    """A client that checks every answer against the description of its route."""

    def __init__(self, service) -> None:
        app = build_app(service)
        self.description: dict[str, Any] = app.openapi()
        self.client = TestClient(app, "http://127.0.0.1", client=("127.0.0.1", 1))
        self.checked: set[tuple[str, str]] = set()

    def schema(self, method: str, route: str, code: int, kind: str) -> dict[str, Any]:
        responses = self.description["paths"][route][method]["responses"]
        schema: dict[str, Any] = responses[str(code)]["content"][kind]["schema"]
        return schema

    def call(self, method: str, route: str, path: str = "", **options: Any) -> Any:
        response = self.client.request(method, path or route, **options)
        kind = response.headers["content-type"].partition(";")[0]
        schema = self.schema(method, route, response.status_code, kind)
        answer = response.json() if kind == "application/json" else response.text
        jsonschema.validate(answer, {**schema, "components": self.description["components"]})
        if response.status_code < 300:
            self.checked.add((method, route))
        return answer


def test_every_answer_is_described_by_its_properties(folder) -> None:
    with open_service(folder[0], follow=True) as service:
        description = Interface(service).description
    components = description["components"]["schemas"]

    def resolve(schema: dict[str, Any]) -> dict[str, Any]:
        schema = schema["items"] if schema.get("type") == "array" else schema
        return components[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema

    routes = 0
    for route, methods in description["paths"].items():
        for method, operation in methods.items():
            routes += 1
            codes = operation["responses"]
            (success,) = [code for code in codes if code.startswith("2")]
            for kind, content in codes[success]["content"].items():
                schema = resolve(content["schema"])
                assert (kind == "text/plain" and schema == {"type": "string"}) or (
                    kind == "application/json" and schema["properties"]
                ), f"{method} {route}"
            errors = {code for code in codes if not code.startswith("2")}
            assert errors >= {"400", "401", "403", "413", "429", "500", "507"}
            for code in errors:
                schema = resolve(codes[code]["content"]["application/json"]["schema"])
                assert set(schema["properties"]) == {"error", "request_id"}, f"{route} {code}"
    assert routes == 20


def test_every_real_answer_fits_its_description(folder) -> None:
    """Of a learning service in use and of a replica; every route answers at least once."""
    images = encode_test_images(folder[1])
    options = {"adapt_batch_size": 8, "interval": 1, "threads": 1, "max_skew": 1.0, "token": False,
               "require_canary": False, "canary_share": 0.0}  # fmt: skip
    with open_service(folder[0], ServiceSettings.parse(options)) as service:
        api = Interface(service)
        files = [("images", (f"{n}.png", data)) for n, data in enumerate(images[:8])]
        assert len(api.call("post", "/predict", files=files)["predictions"]) == 8
        wait_until(lambda: service.version > 1)
        job = api.call("post", "/learn", files={"archive": zip_session(folder[1], 1, range(2), 8)})
        path = f"/jobs/{job['id']}"
        api.call("get", "/jobs")
        wait_until(lambda: api.call("get", "/jobs/{job}", path)["state"] == "done")
        api.call("post", "/jobs/{job}/cancel", f"{path}/cancel")
        body = {"image": base64.b64encode(images[0]).decode(), "label": "owl", "new_class": True}
        api.call("post", "/correct", json=body)
        api.call("post", "/correct/forget")
        first, second = api.call("get", "/classes")["classes"][:2]
        api.call("post", "/classes/rename", json={"name": first, "to": "owl"})
        api.call("post", "/classes/remove", json={"name": second})
        api.call("post", "/rollback", json={"version": 1})
        api.call("post", "/freeze")
        assert api.call("get", "/status")["frozen"] == "frozen by localhost"
        api.call("post", "/unfreeze")
        assert {entry["what"] for entry in api.call("get", "/audit")} == {
            "taught", "corrected", "forgot corrections", "renamed", "removed", "rolled back",
            "froze", "unfroze"}  # fmt: skip
        assert len(api.call("get", "/versions")) == service.version
        api.call("get", "/versions/{number}", "/versions/1")
        for route in ("/health", "/ready", "/metrics"):
            api.call("get", route)
        routes = {(method, route) for route, methods in api.description["paths"].items()
                  for method in methods}  # fmt: skip
        assert api.checked == routes

        api.call("post", "/rollback", json={"version": 99})
        api.call("get", "/versions/{number}", "/versions/99")
        api.call("post", "/predict", content=b"x", headers={"Content-Type": "text/plain"})
        service.writer.close()
        api.call("get", "/ready")
    with open_service(folder[0], ServiceSettings(token=False), follow=True) as replica:
        api = Interface(replica)
        status = api.call("get", "/status")
        assert set(status) == {"version", "classes", "answered", "waiting", "seconds", "writes"}
        api.call("post", "/freeze")


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("schema") / "learner"
    make_small_learner(folder)
    token = Tokens(folder).add("me", "teach")  # generated requests are not local ones
    limits: ServiceSettings = ServiceSettings.parse({"max_body": 1_000_000, "threads": 1})
    with open_service(folder, limits) as service:
        app = build_app(service)
        # Without these entries every generated request keeps the token that the test sends.
        for path in app.openapi()["paths"].values():
            for operation in path.values():
                operation.pop("security", None)
        yield schemathesis.openapi.from_asgi("/openapi.json", app), token
        assert service.is_ready


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the generator, about the description
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_no_answer_is_a_5xx(generated, mode) -> None:
    """Requests as described, and requests that break the description. None may fail for lack of a
    token, and valid ones must succeed: otherwise nothing but the access check would be tested."""
    interface, token = generated
    codes: Counter[int] = Counter()
    for found in interface.get_all_operations():
        operation = found.ok()
        cases = operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode])

        @settings(max_examples=30, deadline=None, derandomize=True, database=None,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(case=cases)
        def send(case) -> None:
            answer = case.call(headers={"Authorization": f"Bearer {token}"})
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                assert answer.json()["error"]
            codes[answer.status_code] += 1

        try:
            send()
        except Unsatisfiable:
            assert mode == "NEGATIVE"
    assert codes.total() > 100
    assert not {401, 403} & set(codes), codes
    assert codes[200] > 20 or mode == "NEGATIVE", codes
    assert codes[400] + codes[422] > 20, codes
