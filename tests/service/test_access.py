"""Who may do what: tokens, roles, and a service without tokens."""

import contextlib
import json
import os
import socket
import threading
from pathlib import Path

import pytest

from dosapp.errors import BusyError, CorruptRecordError, InputError
from dosapp.service.service import open_service
from dosapp.service.settings import ServiceSettings
from dosapp.service.tokens import Tokens

pytest.importorskip("fastapi")
from starlette.testclient import TestClient

from dosapp.drills.service_process import encode_test_images
from dosapp.service import server
from dosapp.service.http.app import build_app
from support.cli import dosapp
from support.services import free_port

ROLES = {  # a route that is not listed here fails the test below
    "none": {"GET /health", "GET /ready"},
    "predict": {"POST /predict", "GET /classes", "GET /versions", "GET /versions/{number}",
                "GET /status", "GET /metrics"},
    "teach": {"POST /learn", "GET /jobs", "GET /jobs/{job}", "POST /jobs/{job}/cancel",
              "POST /correct", "POST /correct/forget", "POST /classes/rename",
              "POST /classes/remove", "POST /rollback", "POST /freeze", "POST /unfreeze",
              "GET /audit"},
}  # fmt: skip


@contextlib.contextmanager
def connected(folder: Path, client: str = "127.0.0.1", **changes):
    """A client of a service with tokens, unless changes say otherwise."""
    settings: ServiceSettings = ServiceSettings.parse({"threads": 1, **changes})
    with open_service(folder, settings) as service:
        app = build_app(service)
        yield TestClient(app, "http://127.0.0.1", client=(client, 1), raise_server_exceptions=False)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def change_nothing(method: str, route: str) -> tuple[str, str]:
    """A request of a route that is refused for its content, if its sender may ask at all."""
    return method.upper(), route.replace("{number}", "99").replace("{job}", "none")


class TestRoles:
    def test_every_route_of_the_interface_needs_the_role_that_it_states(self, folder) -> None:
        tokens = {role: Tokens(folder).add(role, role) for role in ("predict", "teach")}
        found: dict[str, set[str]] = {role: set() for role in ROLES}
        with connected(folder) as client:
            paths = client.get("/openapi.json").json()["paths"]
            for route, operations in paths.items():
                for method, operation in operations.items():
                    role = operation["x-role"]
                    found[role].add(f"{method.upper()} {route}")
                    assert ("security" in operation) is (role != "none"), route
                    request = change_nothing(method, route)
                    code = {
                        name: client.request(*request, headers=bearer(token)).status_code
                        for name, token in {"": "wrong", **tokens}.items()
                    }
                    code["no token"] = client.request(*request).status_code
                    refused = [name for name, answer in code.items() if answer in (401, 403)]
                    expected = {"none": [], "predict": ["", "no token"],
                                "teach": ["", "predict", "no token"]}[role]  # fmt: skip
                    assert refused == expected, (route, code)
                    assert code[""] == code["no token"] == (401 if role != "none" else 200)
                    assert all(answer < 500 for answer in code.values()), (route, code)
        assert found == ROLES

    def test_every_other_path_shows_nothing_of_the_learner(self, folder) -> None:
        """The page and the interface's description are for everyone; they have no content."""
        with connected(folder) as client:
            open_paths = {"/", "/app.css", "/app.js", "/docs", "/openapi.json",
                          "/docs/files/swagger-ui.css"}  # fmt: skip
            assert client.get("/samples/tokens.json").status_code == 404
            assert client.get("/samples/..%2fstatic%2fapp.js").status_code == 404
            texts = [client.get(path).text for path in sorted(open_paths)]
            known = json.loads((folder / "learner.json").read_text())
        assert all(texts)
        assert not any(name in text for name in known.get("classes", ["owl"]) for text in texts)

    def test_tokens_are_stored_as_hashes_and_the_audit_names_their_owner(self, folder) -> None:
        token = Tokens(folder).add("alice", "teach")
        assert token not in (folder / "tokens.json").read_text()
        with connected(folder) as client:
            assert client.post("/freeze", headers=bearer(token)).status_code == 200
        line = json.loads((folder / "audit.jsonl").read_text())
        assert (line["who"], line["what"]) == ("alice", "froze")

    def test_wrong_token_and_no_token_get_different_sentences(self, folder) -> None:
        token = Tokens(folder).add("alice", "predict")
        with connected(folder) as client:
            wrong = client.get("/classes", headers=bearer(token[:-1])).json()["error"]
            missing = client.get("/classes").json()["error"]
            basic = client.get("/classes", headers={"Authorization": f"Basic {token}"})
        assert "is wrong or was removed" in wrong
        assert "the request has none" in missing
        assert basic.status_code == 401


class TestTokenFile:
    def test_a_removed_token_stops_working_at_once(self, folder) -> None:
        tokens = Tokens(folder)  # another process' view of the file
        alice, bob = tokens.add("alice", "predict"), tokens.add("bob", "predict")
        with connected(folder) as client:
            assert client.get("/classes", headers=bearer(alice)).status_code == 200
            tokens.remove("alice")
            assert client.get("/classes", headers=bearer(alice)).status_code == 401
            assert client.get("/classes", headers=bearer(bob)).status_code == 200
            carol = tokens.add("carol", "predict")
            assert client.get("/classes", headers=bearer(carol)).status_code == 200

    def test_removing_the_last_token_lets_nobody_in(self, folder) -> None:
        tokens = Tokens(folder)
        token = tokens.add("alice", "teach")
        with connected(folder) as client:
            tokens.remove("alice")
            codes = [client.post("/freeze", headers=head).status_code
                     for head in ({}, bearer(token), bearer(""))]  # fmt: skip
            assert codes == [401, 401, 401]
            tokens.path.unlink()
            assert client.post("/freeze").status_code == 401

    BROKEN = [
        "", " ", "{", "[]", "null", '"x"', '{"alice": {}}', '{"alice": null}', "\x00\x00",
        '{"alice": {"role": "king", "sha256": "%s"}}', '{"alice": {"role": "teach"}}',
        '{"alice": {"role": "teach", "sha256": ""}}', '{"": {"role": "teach", "sha256": "%s"}}',
        '{"alice": {"role": "teach", "sha256": null}}', '{"alice": ["teach", "%s"]}',
    ]  # fmt: skip

    def test_tokens_that_are_changed_together_are_all_changed(self, tmp_path) -> None:
        removed = Tokens(tmp_path).add("removed", "predict")
        names = [f"caller {n}" for n in range(12)]
        changes = [lambda name=name: Tokens(tmp_path).add(name, "predict") for name in names]
        changes.insert(4, lambda: Tokens(tmp_path).remove("removed"))
        threads = [threading.Thread(target=change) for change in changes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(Tokens(tmp_path).known) == set(names)
        assert Tokens(tmp_path).caller(removed) is None

    def test_a_file_that_is_no_list_of_tokens_grants_nothing(self, folder) -> None:
        tokens = Tokens(folder)
        token = tokens.add("alice", "teach")
        right, digest = tokens.path.read_text(), tokens.known["alice"].sha256
        with connected(folder) as client:
            for content in self.BROKEN:
                tokens.path.write_text(content.replace("%s", digest))
                answers = [client.get("/classes", headers=bearer(t)) for t in (token, "", "x")]
                assert [a.status_code for a in answers] == [503, 401, 503], content
                assert str(folder) not in answers[0].text
                tokens.path.write_text(right)
                assert client.get("/classes", headers=bearer(token)).status_code == 200
        tokens.path.write_text("")
        with pytest.raises(CorruptRecordError, match="no token is accepted; mend the file"):
            server.serve(folder, ServiceSettings(), port=int(free_port()))

    def test_a_file_that_cannot_be_read_grants_nothing(self, folder) -> None:
        token = Tokens(folder).add("alice", "teach")
        with connected(folder) as client:
            os.unlink(folder / "tokens.json")
            (folder / "tokens.json").mkdir()
            assert client.get("/classes", headers=bearer(token)).status_code == 503


class TestFirstStart:
    def test_a_token_is_made_once_and_printed_with_the_page(self, folder) -> None:
        tokens = Tokens(folder)
        first = server.describe_access("http://127.0.0.1:8000/", folder, tokens)
        address = first.splitlines()[0].split()[0]
        page, _, token = address.partition("#token=")
        assert page == "http://127.0.0.1:8000/"
        assert tokens.caller(token).role == "teach"
        later = server.describe_access(page, folder, tokens)
        assert "#token" not in later
        assert "needs a token (owner)" in later
        tokens.remove("owner")
        assert "answers no request" in server.describe_access(page, folder, tokens)
        assert not tokens.known

    def test_a_replica_writes_no_token(self, folder) -> None:
        said = server.describe_access("http://x/", folder, Tokens(folder), may_add=False)
        assert "dosapp token add" in said
        assert not (folder / "tokens.json").exists()

    def test_without_tokens_other_machines_are_not_served(self, folder) -> None:
        with pytest.raises(InputError, match=r"on this machine only, not on 0\.0\.0\.0"):
            server.serve(folder, ServiceSettings(token=False), host="0.0.0.0")

    def test_a_taken_port_is_found_before_anything_is_prepared_or_printed(self, folder) -> None:
        said: list[str] = []
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(BusyError, match=f"port {port} .* is taken"):
                server.serve(folder, ServiceSettings(), port=port, on_ready=said.append,
                             prepare=lambda: said.append("prepared"))  # fmt: skip
        assert said == []
        assert not (folder / "tokens.json").exists()

    def test_folders_that_do_not_exist_are_one_sentence(self, folder) -> None:
        for flag, what in (("--canary", "does not exist"), ("--session-folder", "no folder")):
            message = dosapp("serve", folder, flag, folder / "nope", code=2).stderr
            assert f"{flag} is '{folder / 'nope'}', which" in message
            assert what in message
            assert message.count("\n") == 1


class TestWithoutTokens:
    FOREIGN = [
        {"Forwarded": "for=10.0.0.1"}, {"X-Forwarded-For": "127.0.0.1"}, {"Via": "1.1 proxy"},
        {"X-Forwarded-Proto": "https"}, {"X-Forwarded-Host": "localhost"}, {"X-Real-IP": "::1"},
        {"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example"}, {"Host": "[::1"},
        {"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"},
    ]  # fmt: skip

    def test_requests_of_proxies_and_of_other_sites_are_refused(self, folder) -> None:
        with connected(folder, token=False) as client:
            for headers in self.FOREIGN:
                for method, path in (("POST", "/freeze"), ("GET", "/classes")):
                    answer = client.request(method, path, headers=headers)
                    assert answer.status_code == 403, headers
                    assert "without tokens only programs on this" in answer.json()["error"]
        assert not (folder / "audit.jsonl").exists()

    def test_programs_of_this_machine_need_no_token(self, folder) -> None:
        with connected(folder, token=False) as client:
            for host in ("127.0.0.1", "localhost:8000", "[::1]:8000"):
                head = {"Host": host, "Origin": f"http://{host}"}
                assert client.post("/freeze", headers=head).status_code == 200

    def test_other_machines_are_refused(self, folder) -> None:
        with connected(folder, client="10.0.0.7", token=False) as client:
            assert client.get("/classes").status_code == 403


def test_every_answer_has_the_security_headers(folder, scenario) -> None:
    token = Tokens(folder).add("alice", "predict")
    image = {"images": encode_test_images(scenario)[0]}
    with connected(folder) as client:
        answers = [client.get(path) for path in
                   ("/", "/docs", "/docs/files/swagger-ui.css", "/openapi.json", "/nothing",
                    "/classes", "/health")]  # fmt: skip
        answers.append(client.post("/predict", files=image, headers=bearer(token)))
        for answer in answers:
            assert answer.headers["x-content-type-options"] == "nosniff", answer.url
            assert answer.headers["referrer-policy"] == "no-referrer"
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "script-src 'unsafe-inline'" not in policy
