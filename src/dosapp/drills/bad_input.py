"""Requests no honest client sends: each gets a 4xx, and nothing changes.

Every fiftieth request is a good one and must get the answer it got at the beginning. The weights'
digest is compared before and after. What a request is made of is drawn from a seed.
"""

import base64
import io
import json
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dosapp.core.chance import chance
from dosapp.drills.served import pictures, small_learner
from dosapp.learner import Learner
from dosapp.service.service import opened
from dosapp.service.settings import ServiceSettings

Request = tuple[str, str, dict[str, Any]]  # verb, path, what httpx is given
STRICT = {"body": 2_000_000, "pixels": 1_000_000, "images": 16, "lesson_images": 50, "jobs": 2}
NAMES = ["", " ", "\t\n", "\x00", "a" * 5000, "\u202e\u0007", "..", "../../etc"]


def drill(
    folder: Path, count: int = 2000, watch: Callable[[str], None] = lambda words: None
) -> dict[str, Any]:
    from starlette.testclient import TestClient

    from dosapp.service.app import build

    stream = small_learner(folder)
    good = pictures(stream)
    before = Learner.load(folder).digest()
    settings: ServiceSettings = ServiceSettings.checked(
        {**STRICT, "adapt": False, "lessons": folder / "versions"}
    )
    codes: Counter[str] = Counter()
    wrong: list[str] = []
    with opened(folder, settings) as service:
        client = TestClient(build(service), "http://127.0.0.1", raise_server_exceptions=False)

        def honest() -> Any:
            files = [("images", (f"{n}.png", data)) for n, data in enumerate(good[:2])]
            answer = client.post("/predict", files=files)
            return answer.status_code, answer.json()

        first = honest()
        for n, (kind, (verb, path, more)) in enumerate(bad_requests(good[0], count)):
            answer = client.request(verb, path, **more)
            codes[f"{kind}: {answer.status_code}"] += 1
            if not 400 <= answer.status_code < 500:
                wrong.append(f"{kind}: {verb} {path[:60]} got {answer.status_code}")
            if n % 50 == 49:
                watch(f"{n + 1} of {count} bad requests")
                if honest() != first:
                    wrong.append(f"after request {n + 1} an honest one got another answer")
    after = Learner.load(folder).digest()
    return {
        "requests": count,
        "honest_between": count // 50,
        "codes": dict(sorted(codes.items())),
        "wrong": wrong,
        "weights_unchanged": before == after,
    }


def bad_requests(image: bytes, count: int) -> Iterator[tuple[str, Request]]:
    """Kinds in turn, each another every time."""
    kinds = [
        _cut_image, _flipped_image, _huge_image, _no_image, _not_base64, _wrong_types, _bad_json,
        _bad_tensor, _nan_tensor, _wrong_shape, _bomb, _traversal, _bad_names, _empty_zip,
        _cut_zip, _many_members, _folder_outside, _unknown_route, _unknown_version, _unknown_class,
        _wrong_method, _large_body, _odd_content, _bad_form,
    ]  # fmt: skip
    for n in range(count):
        kind = kinds[n % len(kinds)]
        yield kind.__name__[1:].replace("_", " "), kind(chance("bad", n), image)


def _upload(data: bytes, path: str = "/predict", name: str = "images") -> Request:
    return "POST", path, {"files": [(name, ("x.png", data))]}


def _cut_image(random: np.random.Generator, image: bytes) -> Request:
    return _upload(image[: int(random.integers(0, len(image) // 2))])


def _flipped_image(random: np.random.Generator, image: bytes) -> Request:
    data = bytearray(image)
    for place in random.integers(0, len(data), 40):
        data[place] ^= int(random.integers(1, 256))
    data[:4] = b"\x89PNX"  # whatever the rest has become, this is no picture
    return _upload(bytes(data))


def _huge_image(random: np.random.Generator, image: bytes) -> Request:
    """A header that promises more pixels than anybody should decode."""
    side = int(random.integers(5_000, 2**31 - 1))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk
    data += struct.pack(">I", zlib.crc32(chunk)) + image[33:]
    return _upload(data)


def _no_image(random: np.random.Generator, image: bytes) -> Request:
    return _upload(random.bytes(int(random.integers(0, 3000))))


def _not_base64(random: np.random.Generator, image: bytes) -> Request:
    text = base64.b64encode(image).decode()
    return "POST", "/predict", {"json": {"images": [text[:-3] + "*é%"]}}


def _wrong_types(random: np.random.Generator, image: bytes) -> Request:
    values: list[Any] = [None, 3, -1.5, True, [], {}, [[]], [None], [{}], "x", 1e400]
    bodies: list[tuple[str, Any]] = [
        ("/predict", {"images": values[random.integers(len(values))]}),
        ("/predict", {"pictures": ["x"]}),
        ("/rollback", {"version": ["x", None, -1, 0, 1.5, 10**30][random.integers(6)]}),
        ("/correct", {"image": 3, "label": None}),
        ("/classes/rename", {"name": ["a"], "to": 3}),
        ("/classes/remove", {}),
        ("/learn", {"folder": 7}),
        ("/learn", {"folders": "x"}),
    ]
    path, body = bodies[random.integers(len(bodies))]
    return "POST", path, {"content": json.dumps(body), "headers": _kind("application/json")}


def _bad_json(random: np.random.Generator, image: bytes) -> Request:
    texts = [b"{", b"[" * 5000, b'{"images": NaN}', b"\xff\xfe", b'"\\ud800"', b"null", b"[]"]
    path = ["/predict", "/rollback", "/correct", "/classes/rename"][random.integers(4)]
    text = texts[random.integers(len(texts))]
    return "POST", path, {"content": text, "headers": _kind("application/json")}


def _tensor(data: bytes, shape: str, dtype: str = "float32") -> Request:
    head = _kind("application/octet-stream")
    query = {"shape": shape, "dtype": dtype}
    return "POST", "/predict", {"content": data, "params": query, "headers": head}


def _bad_tensor(random: np.random.Generator, image: bytes) -> Request:
    return _tensor(random.bytes(int(random.integers(0, 12000))), "1,3,32,32")


def _nan_tensor(random: np.random.Generator, image: bytes) -> Request:
    values = random.random((1, 3, 32, 32)).astype("<f4")
    poison = [np.nan, np.inf, -np.inf, -0.5, 1e30][random.integers(5)]
    values[0, 0, int(random.integers(32)), 0] = poison
    return _tensor(values.tobytes(), "1,3,32,32")


def _wrong_shape(random: np.random.Generator, image: bytes) -> Request:
    shapes = ["", "1", "1,3,32", "0,3,32,32", "-1,3,32,32", "1,3,64,64", "a,b,c,d", "1e9,3,32,32",
              "9" * 400 + ",3,32,32", "1,3,32,32,1"]  # fmt: skip
    return _tensor(bytes(3 * 32 * 32 * 4), shapes[random.integers(len(shapes))])


def _zip(members: list[tuple[str, bytes]]) -> bytes:
    with io.BytesIO() as buffer:
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members:
                archive.writestr(name, data)
        return buffer.getvalue()


def _lesson(data: bytes) -> Request:
    return _upload(data, "/learn", "archive")


def _bomb(random: np.random.Generator, image: bytes) -> Request:
    return _lesson(_zip([("owl/1.png", bytes(int(random.integers(3, 60)) * 1_000_000))]))


def _traversal(random: np.random.Generator, image: bytes) -> Request:
    names = ["../../etc/cron.d/x.png", "/etc/passwd.png", "..\\..\\x.png", "a/../../x.png", "x.png"]
    return _lesson(_zip([(names[random.integers(len(names))], image)]))


def _bad_names(random: np.random.Generator, image: bytes) -> Request:
    name = NAMES[random.integers(len(NAMES))]
    if name.startswith(".."):
        return "POST", "/classes/rename", {"json": {"name": name, "to": "x"}}
    return "POST", "/learn", {"data": {"name": name}, "files": [("images", ("x.png", image))]}


def _empty_zip(random: np.random.Generator, image: bytes) -> Request:
    members = [[], [("owl/", b"")], [("owl/readme.txt", b"hello")], [("owl/1.png", b"")]]
    return _lesson(_zip(members[random.integers(4)]))


def _cut_zip(random: np.random.Generator, image: bytes) -> Request:
    data = _zip([("owl/1.png", image)])
    return _lesson(data[: int(random.integers(0, len(data) - 1))])


def _many_members(random: np.random.Generator, image: bytes) -> Request:
    return _lesson(_zip([(f"owl/{n}.png", b"x") for n in range(60)]))


def _folder_outside(random: np.random.Generator, image: bytes) -> Request:
    places = ["..", "../..", "/etc", "/", "~", "nowhere", "x\x00y", "a" * 9000, "."]
    return "POST", "/learn", {"json": {"folder": places[random.integers(len(places))]}}


def _unknown_route(random: np.random.Generator, image: bytes) -> Request:
    paths = ["/nothing", "/jobs/none", "/versions/abc", "/../etc/passwd", "/predict/x", "/%00"]
    return "GET", paths[random.integers(len(paths))], {}


def _unknown_version(random: np.random.Generator, image: bytes) -> Request:
    number = int(random.integers(1000, 2**31))
    if random.random() < 0.5:
        return "GET", f"/versions/{number * 10**9}", {}
    return "POST", "/rollback", {"json": {"version": number}}


def _unknown_class(random: np.random.Generator, image: bytes) -> Request:
    name = "".join(chr(int(c)) for c in random.integers(0x20, 0xD000, 8))
    if random.random() < 0.5:
        return "POST", "/classes/remove", {"json": {"name": name}}
    return "POST", "/classes/rename", {"json": {"name": name, "to": "owl"}}


def _wrong_method(random: np.random.Generator, image: bytes) -> Request:
    return ["GET", "PUT", "DELETE", "PATCH"][random.integers(4)], "/predict", {}


def _large_body(random: np.random.Generator, image: bytes) -> Request:
    size = STRICT["body"] + int(random.integers(1, 1000))
    path = ["/predict", "/learn", "/rollback"][random.integers(3)]
    return "POST", path, {"content": bytes(size), "headers": _kind("application/octet-stream")}


def _odd_content(random: np.random.Generator, image: bytes) -> Request:
    kinds = ["text/plain", "application/xml", "", "multipart/form-data", "é/ü", "image"]
    kind = kinds[random.integers(len(kinds))].encode()
    return "POST", "/predict", {"content": b"hello", "headers": {b"Content-Type": kind}}


def _bad_form(random: np.random.Generator, image: bytes) -> Request:
    head = _kind("multipart/form-data; boundary=x")
    data = random.bytes(int(random.integers(0, 500)))
    return "POST", ["/predict", "/learn"][random.integers(2)], {"content": data, "headers": head}


def _kind(kind: str) -> dict[str, str]:
    return {"Content-Type": kind}
