"""TLS in front: the examples in `deploy/`, run with the real nginx and Caddy."""

import contextlib
import http.client
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
from dosapp.service.service import open_service
from dosapp.service.settings import ServiceSettings
from dosapp.service.tokens import Tokens
from support.services import free_port, serve_at_port

DEPLOY = Path(__file__).parents[2] / "deploy"
NAME = "dosapp.example"  # of the examples
CLOSED = 0  # in place of a status


def start_nginx(config: str, folder: Path) -> subprocess.Popen[bytes]:
    places = "".join(
        f"{kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = config.replace("http {", f"http {{\naccess_log off;\n{places}", 1)
    (folder / "nginx.conf").write_text(f"daemon off;\npid {folder}/pid;\n{config}")
    command = ["nginx", "-c", folder / "nginx.conf", "-p", folder, "-e", folder / "nginx.log"]
    return subprocess.Popen(command)


def start_caddy(config: str, folder: Path) -> subprocess.Popen[bytes]:
    off = "{\n\tadmin off\n\tauto_https disable_redirects"
    (folder / "Caddyfile").write_text(config.replace("{\n", f"{off}\n", 1))
    command = ["caddy", "run", "--config", folder / "Caddyfile", "--adapter", "caddyfile"]
    environment = {**os.environ, "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with (folder / "caddy.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


PROXIES: dict[str, tuple[str, Callable[[str, Path], subprocess.Popen[bytes]]]] = {
    "nginx": ("nginx.conf", start_nginx),
    "caddy": ("Caddyfile", start_caddy),
}


def fill_in(config: str, folder: Path, port: str, upstream: str) -> str:
    """An example with ports of this machine and a certificate of the test."""
    config = config.replace("/etc/dosapp", str(folder)).replace("127.0.0.1:8000", upstream)
    config = re.sub(r"^dosapp\.example \{", f"{NAME}:{port} {{", config, flags=re.MULTILINE)
    config = re.sub(r"^:443 \{", f":{port} {{", config, flags=re.MULTILINE)
    return re.sub(r"listen 443", f"listen 127.0.0.1:{port}", config)


@contextlib.contextmanager
def proxied(program: str, upstream: str, folder: Path) -> Iterator["Ask"]:
    """Run a proxy in front of a service; yields a function that sends requests through it."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}",
         "-keyout", folder / "key.pem", "-out", folder / "certificate.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    file, start = PROXIES[program]
    port = free_port()
    process = start(fill_in((DEPLOY / file).read_text(), folder, port, upstream), folder)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", int(port)), timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, "the proxy has ended"
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield Ask(int(port), folder / "certificate.pem")
    finally:
        process.terminate()
        process.wait(30)


class Ask:
    """Sends requests over TLS, with a certificate that is checked."""

    def __init__(self, port: int, certificate: Path) -> None:
        self.port, self.context = port, ssl.create_default_context(cafile=str(certificate))

    def __call__(
        self, method: str, path: str, token: str = "", host: str = NAME, body: bytes = b"",
        **headers: str,
    ) -> int:  # fmt: skip
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        with self.context.wrap_socket(raw, server_hostname=NAME) as secure:
            connection = http.client.HTTPConnection(NAME)
            connection.sock = secure
            bearer = {"Authorization": f"Bearer {token}"} if token else {}
            sent = {"Host": host, **bearer, **headers}
            try:
                connection.request(method, path, body or None, sent)
                return connection.getresponse().status
            except (ConnectionError, ssl.SSLEOFError):
                return CLOSED


@pytest.mark.parametrize("program", PROXIES)
def test_roles_hold_behind_tls_and_a_forged_host_gives_nothing(program, folder, tmp_path) -> None:
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    tokens = {role: Tokens(folder).add(role, role) for role in ("predict", "teach")}
    settings = ServiceSettings(threads=1, adapt=False)
    with open_service(folder, settings) as service, serve_at_port(service) as url:
        upstream = url.removeprefix("http://").strip("/")
        with proxied(program, upstream, tmp_path) as ask:
            assert ask("GET", "/ready") == 200
            assert ask("GET", "/classes", tokens["predict"]) == 200
            assert ask("POST", "/freeze", tokens["predict"]) == 403
            assert ask("POST", "/freeze", tokens["teach"]) == 200
            for host in (NAME, "localhost", "127.0.0.1", "127.0.0.1:8000", "[::1]"):
                for forged in ({}, {"X-Forwarded-For": "127.0.0.1", "X-Real-IP": "127.0.0.1"}):
                    assert ask("POST", "/unfreeze", host=host, **forged) in (400, 401, 403, 421)
            large = bytes(70_000_000)  # a sender may see the end of the connection first
            assert ask("POST", "/predict", tokens["predict"], body=large) in (413, CLOSED)
        assert service.status()["frozen"] == "frozen by teach"


@pytest.mark.parametrize("program", PROXIES)
def test_without_tokens_requests_of_the_proxy_are_refused(program, folder, tmp_path) -> None:
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    settings = ServiceSettings(threads=1, adapt=False, token=False)
    with open_service(folder, settings) as service, serve_at_port(service) as url:
        upstream = url.removeprefix("http://").strip("/")
        with proxied(program, upstream, tmp_path) as ask:
            assert ask("GET", "/health") == 200
            for host in (NAME, "localhost", "127.0.0.1"):
                assert ask("POST", "/freeze", host=host) in (400, 403, 421)
        assert service.status()["frozen"] == ""
