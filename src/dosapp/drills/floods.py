"""Requests that try to keep a service from its honest callers. Loopback only; bounded in time.

Run as a process of its own, so that it shares no interpreter with the clients that are measured:
`python -m dosapp.drills.floods NAME PORT SECONDS < FILE`, where FILE has the JSON of `Target`'s
other fields. Imports no torch.
"""

import base64
import contextlib
import http.client
import io
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

HOST = "127.0.0.1"
MAX_REQUESTS = 20_000  # of one thread
LARGE_SIDE = 6_320  # pixels: an image of 40 megapixels


@dataclass
class Target:
    """A service, and what a hostile caller needs for requests to it."""

    port: int
    end: float  # monotonic
    token: str  # of the role predict
    image: bytes  # a PNG that the service accepts

    def goes_on(self) -> bool:
        """Whether the flood is not over."""
        return time.monotonic() < self.end

    def head(
        self, method: str, path: str, token: str, length: int, kind: str = "image/png"
    ) -> bytes:
        """The head of a request."""
        lines = (f"{method} {path} HTTP/1.1", f"Host: {HOST}:{self.port}", f"Content-Type: {kind}",
                 f"Authorization: Bearer {token}", f"Content-Length: {length}")  # fmt: skip
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


def hold(target: Target, count: int, begin: bytes, more: bytes = b"") -> None:
    """Keep connections open that have sent a beginning, and send a little more every second."""
    connections: list[socket.socket] = []
    while target.goes_on():
        for connection in list(connections):
            try:
                connection.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    if not connection.recv(1000):
                        raise ConnectionError
                if more:
                    connection.send(more)
            except OSError:
                connection.close()
                connections.remove(connection)
        while len(connections) < count and target.goes_on():
            try:
                connection = socket.create_connection((HOST, target.port), timeout=5)
                connection.sendall(begin)
                connections.append(connection)
            except OSError:
                break
        time.sleep(1)
    for connection in connections:
        connection.close()


def silent_connections(target: Target) -> None:
    """150 connections that send nothing."""
    hold(target, 150, b"")


def silent_bodies(target: Target) -> None:
    """150 connections without a token that announce a large body and send nothing of it."""
    hold(target, 150, target.head("POST", "/predict", "wrong", 60_000_000))


def slow_bodies(target: Target) -> None:
    """128 bodies of a known caller, a byte per second each."""
    hold(target, 128, target.head("POST", "/predict", target.token, 60_000_000), b"x")


def endless_headers(target: Target) -> None:
    """Eight connections that send headers without end."""

    def send() -> None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((HOST, target.port), timeout=5) as connection,
        ):
            connection.sendall(f"GET /classes HTTP/1.1\r\nHost: {HOST}\r\n".encode())
            for n in range(100_000):
                connection.sendall(b"X-%d: %s\r\n" % (n, b"y" * 200))
                if not target.goes_on():
                    return

    repeat(target, 8, send)


def large_images(target: Target) -> None:
    """Eight requests at a time, of twelve PNGs of 40 megapixels each."""
    from PIL import Image

    with io.BytesIO() as buffer:
        Image.new("RGB", (LARGE_SIDE, LARGE_SIDE)).save(buffer, "PNG")
        body, kind = make_form([buffer.getvalue()] * 12)
    repeat(target, 8, lambda: post(target, body, kind))


def many_images(target: Target) -> None:
    """Eight requests of 256 images at a time: 2,048 in flight."""
    body, kind = make_form([target.image] * 256)
    repeat(target, 8, lambda: post(target, body, kind))


def large_json(target: Target) -> None:
    """40 JSON bodies of 7.9 MB at a time."""
    text = base64.b64encode(target.image).decode()
    count = 7_900_000 // len(text)
    body = json.dumps({"images": [text] * count}).encode()
    repeat(target, 40, lambda: post(target, body, "application/json"))


def pollers(target: Target) -> None:
    """24 clients that read the list of versions without pause."""

    def poll() -> None:
        connection = http.client.HTTPConnection(HOST, target.port, timeout=30)
        with contextlib.closing(connection):
            while target.goes_on():
                headers = {"Authorization": f"Bearer {target.token}"}
                connection.request("GET", "/versions", headers=headers)
                connection.getresponse().read()

    repeat(target, 24, poll)


def large_bodies(target: Target) -> None:
    """16 bodies of 60 MB at a time, without a valid token; each sender sends what is taken."""
    piece, size = bytes(1 << 16), 60_000_000

    def send() -> None:
        with socket.create_connection((HOST, target.port), timeout=5) as connection:
            connection.sendall(target.head("POST", "/predict", "wrong", size))
            for _ in range(size // len(piece)):
                connection.sendall(piece)
                if not target.goes_on():
                    return
            connection.recv(1000)

    repeat(target, 16, send)


FLOODS: dict[str, Callable[[Target], None]] = {
    f.__name__.replace("_", " "): f
    for f in (silent_connections, silent_bodies, slow_bodies, endless_headers, large_images,
              many_images, large_json, large_bodies, pollers)
}  # fmt: skip


def repeat(target: Target, threads: int, action: Callable[[], None]) -> None:
    """Repeat an action in threads until the end; a refused connection is tried again."""

    def run() -> None:
        for _ in range(MAX_REQUESTS):
            if not target.goes_on():
                return
            try:
                action()
            except (OSError, http.client.HTTPException):
                time.sleep(0.05)

    workers = [threading.Thread(target=run, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.0, target.end - time.monotonic()) + 1)


def post(target: Target, body: bytes, kind: str) -> None:
    """Send one request to predict and read its answer."""
    left = max(1.0, target.end - time.monotonic())
    connection = http.client.HTTPConnection(HOST, target.port, timeout=left)
    headers = {"Authorization": f"Bearer {target.token}", "Content-Type": kind}
    with contextlib.closing(connection):
        connection.request("POST", "/predict?learn=false", body, headers)
        connection.getresponse().read()


def make_form(images: list[bytes]) -> tuple[bytes, str]:
    """A multipart form of images, and its content type."""
    boundary = uuid.uuid4().hex
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="images"; filename="{n}.png"\r\n'
        "Content-Type: image/png\r\n\r\n".encode()
        + data
        + b"\r\n"
        for n, data in enumerate(images)
    ]
    return b"".join(
        parts
    ) + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def main() -> None:
    """Run one flood."""
    name, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    os.nice(10)  # the measured clients have priority, as if the flood came from another machine
    given = json.load(sys.stdin)
    image = base64.b64decode(given["image"])
    FLOODS[name](Target(port, time.monotonic() + seconds, given["token"], image))
    os._exit(0)  # threads may still wait for answers


if __name__ == "__main__":
    main()
