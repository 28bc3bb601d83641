"""A model hub on loopback: the part of the Hugging Face API that up- and downloads use."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_test"


class FakeHub(ThreadingHTTPServer):
    """Repositories in memory: name → files of the last commit."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit_id(self, name: str) -> str:
        files = sorted(self.repositories[name].items())
        return hashlib.sha1(repr(files).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def answer(self, body: Any = b"", code: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, code: int, kind: str) -> None:
        self.answer({"error": kind}, code, X_Error_Code=kind, X_Error_Message=kind)

    @property
    def is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.path.partition("?")[0]
        if not self.is_known:
            return self.refuse(401, "Unauthorized")
        if path == "/api/repos/create":
            values = json.loads(data)
            name = "/".join(filter(None, [values.get("organization"), values["name"]]))
            self.server.repositories.setdefault(name, {})
            if values.get("private") or values.get("visibility") == "private":
                self.server.private.add(name)
            return self.answer({"url": f"{self.server.url}/{name}", "name": name})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        name, action = re.fullmatch(r"/api/models/(.+?)/(preupload|commit)/main", path).groups()
        if action == "preupload":
            files = json.loads(data)["files"]
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            return self.answer({"files": [{"path": file["path"], **plain} for file in files]})
        for line in data.splitlines():
            item = json.loads(line)
            if item["key"] == "file":
                content = base64.b64decode(item["value"]["content"])
                self.server.repositories[name][item["value"]["path"]] = content
        oid = self.server.commit_id(name)
        return self.answer(
            {"commitUrl": f"{self.server.url}/{name}/commit/{oid}", "commitOid": oid}
        )

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        found = re.fullmatch(r"/api/models/(.+?)(/revision/[^/]+|/tree/.+)?", path)
        if found is None:
            return self.send_file(path)
        name, what = found.groups()
        if name not in self.server.repositories or not self.is_visible(name):
            return self.refuse(404 if self.is_known else 401, "RepoNotFound")
        files = self.server.repositories[name]
        if what and what.startswith("/tree"):
            entries = [
                {"type": "file", "path": file, "size": len(data), "oid": _digest(data)}
                for file, data in files.items()
            ]
            return self.answer(entries)
        siblings = [{"rfilename": file} for file in files]
        return self.answer({"id": name, "sha": self.server.commit_id(name), "siblings": siblings})

    def do_HEAD(self) -> None:
        self.do_GET()

    def is_visible(self, name: str) -> bool:
        return self.is_known or name not in self.server.private

    def send_file(self, path: str) -> None:
        name, file = re.fullmatch(r"/(.+?/.+?)/resolve/[^/]+/(.+)", path).groups()
        data = self.server.repositories[name].get(file)
        if data is None or not self.is_visible(name):
            return self.refuse(404, "EntryNotFound")
        etag, commit = f'"{_digest(data)}"', self.server.commit_id(name)
        return self.answer(data, ETag=etag, X_Repo_Commit=commit)


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def serve_fake_hub() -> Iterator[FakeHub]:
    """Serve an empty hub while the context is open."""
    hub = FakeHub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
