"""Requests no honest client sends: each gets a refusal meant for its kind, and nothing changes.

They come with the token of somebody who may teach, so that what refuses them is what is wrong with
them; only the two kinds about tokens are turned away at the door. After every fiftieth a good
request must get the answer it got at the beginning, and the first of them an answer at all. The
weights' digest is compared before and after. What a request is made of is drawn from a seed.
"""

import base64
import io
import json
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dosapp.drills.service_process import make_small_learner, pictures
from dosapp.learner.learner import Learner
from dosapp.runtime.rng import numpy_rng
from dosapp.service.service import open_service
from dosapp.service.settings import ServiceSettings
from dosapp.service.tokens import Tokens

Request = tuple[str, str, dict[str, Any]]  # verb, path, what httpx is given
STRICT = {
    "max_body": 2_000_000, "max_pixels": 1_000_000, "max_images": 16, "max_session_images": 50,
    "max_jobs": 2,
}  # fmt: skip
FOR_TEACHERS = [
    ("POST", "/learn"), ("POST", "/correct"), ("POST", "/correct/forget"), ("POST", "/rollback"),
    ("POST", "/classes/rename"), ("POST", "/classes/remove"), ("POST", "/freeze"),
    ("POST", "/unfreeze"), ("GET", "/audit"), ("GET", "/jobs"),
]  # fmt: skip
NAMES = ["", " ", "\t\n", "\x00", "a" * 5000, "\u202e\u0007", "..", "../../etc"]


@dataclass(frozen=True)
class Given:
    """What an honest client has, for others to spoil."""

    image: bytes
    classes: tuple[str, ...]  # that the learner knows
    token: str  # of somebody who may predict and no more


def drill(
    folder: Path, count: int = 2000, watch: Callable[[str], None] = lambda words: None
) -> dict[str, Any]:
    from starlette.testclient import TestClient

    from dosapp.service.http.app import build_app

    stream = make_small_learner(folder)
    good = pictures(stream)
    before = Learner.load(folder).digest()
    tokens = Tokens(folder)
    teacher = _bearer(tokens.add("teacher", "teach"))
    given = Given(good[0], stream.tasks[0].classes, tokens.add("guest", "predict"))
    settings: ServiceSettings = ServiceSettings.parse(
        {**STRICT, "adapt": False, "session_folder": folder / "versions"}
    )
    codes: Counter[str] = Counter()
    wrong: list[str] = []
    with open_service(folder, settings) as service:
        client = TestClient(
            build_app(service), "http://127.0.0.1", raise_server_exceptions=False, headers=teacher
        )

        def honest() -> Any:
            files = [("images", (f"{n}.png", data)) for n, data in enumerate(good[:2])]
            answer = client.post("/predict", files=files)
            return answer.status_code, answer.json()

        first = honest()
        if first[0] != 200:
            wrong.append(f"an honest request got {first[0]}: {first[1]}")
        for n, (kind, meant, (verb, path, more)) in enumerate(bad_requests(given, count)):
            answer = client.request(verb, path, **more)
            codes[f"{kind}: {answer.status_code}"] += 1
            if answer.status_code not in meant:
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


def bad_requests(given: Given, count: int) -> Iterator[tuple[str, set[int], Request]]:
    """Kinds in turn, each another every time, and the answers meant for the kind."""
    kinds: list[tuple[Callable[[np.random.Generator, Given], Request], set[int]]] = [
        (_cut_image, {400}),
        (_flipped_image, {400}),
        (_huge_image, {400, 413}),
        (_no_image, {400}),
        (_not_base64, {400}),
        (_wrong_types, {400}),
        (_bad_json, {400}),
        (_bad_tensor, {400}),
        (_nan_tensor, {400}),
        (_wrong_shape, {400, 413}),
        (_bomb, {413}),
        (_traversal, {400}),
        (_bad_names, {400}),
        (_unicode_names, {400}),
        (_same_names, {400}),
        (_empty_class, {400}),
        (_empty_zip, {400}),
        (_cut_zip, {400}),
        (_many_members, {413}),
        (_folder_outside, {400}),
        (_unknown_route, {404, 422}),
        (_unknown_version, {400, 404}),
        (_unknown_class, {400}),
        (_wrong_method, {405}),
        (_large_body, {413}),
        (_odd_content, {400, 415}),
        (_bad_form, {400}),
        (_wrong_token, {401}),
        (_weak_token, {403}),
    ]
    for n in range(count):
        kind, meant = kinds[n % len(kinds)]
        yield kind.__name__[1:].replace("_", " "), meant, kind(numpy_rng("bad", n), given)


def _upload(data: bytes, path: str = "/predict", name: str = "images") -> Request:
    return "POST", path, {"files": [(name, ("x.png", data))]}


def _cut_image(random: np.random.Generator, given: Given) -> Request:
    return _upload(given.image[: int(random.integers(0, len(given.image) // 2))])


def _flipped_image(random: np.random.Generator, given: Given) -> Request:
    data = bytearray(given.image)
    for place in random.integers(0, len(data), 40):
        data[place] ^= int(random.integers(1, 256))
    data[:4] = b"\x89PNX"  # whatever the rest has become, this is no picture
    return _upload(bytes(data))


def _huge_image(random: np.random.Generator, given: Given) -> Request:
    """A header that promises more pixels than anybody should decode."""
    side = int(random.integers(5_000, 2**31 - 1))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk
    data += struct.pack(">I", zlib.crc32(chunk)) + given.image[33:]
    return _upload(data)


def _no_image(random: np.random.Generator, given: Given) -> Request:
    return _upload(random.bytes(int(random.integers(0, 3000))))


def _not_base64(random: np.random.Generator, given: Given) -> Request:
    text = base64.b64encode(given.image).decode()
    return "POST", "/predict", {"json": {"images": [text[:-3] + "*é%"]}}


def _wrong_types(random: np.random.Generator, given: Given) -> Request:
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


def _bad_json(random: np.random.Generator, given: Given) -> Request:
    texts = [b"{", b"[" * 5000, b'{"images": NaN}', b"\xff\xfe", b'"\\ud800"', b"null", b"[]"]
    path = ["/predict", "/rollback", "/correct", "/classes/rename"][random.integers(4)]
    text = texts[random.integers(len(texts))]
    return "POST", path, {"content": text, "headers": _kind("application/json")}


def _tensor(data: bytes, shape: str, dtype: str = "float32") -> Request:
    head = _kind("application/octet-stream")
    query = {"shape": shape, "dtype": dtype}
    return "POST", "/predict", {"content": data, "params": query, "headers": head}


def _bad_tensor(random: np.random.Generator, given: Given) -> Request:
    return _tensor(random.bytes(int(random.integers(0, 12000))), "1,3,32,32")


def _nan_tensor(random: np.random.Generator, given: Given) -> Request:
    values = random.random((1, 3, 32, 32)).astype("<f4")
    poison = [np.nan, np.inf, -np.inf, -0.5, 1e30][random.integers(5)]
    values[0, 0, int(random.integers(32)), 0] = poison
    return _tensor(values.tobytes(), "1,3,32,32")


def _wrong_shape(random: np.random.Generator, given: Given) -> Request:
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


def _bomb(random: np.random.Generator, given: Given) -> Request:
    return _lesson(_zip([("owl/1.png", bytes(int(random.integers(3, 60)) * 1_000_000))]))


def _traversal(random: np.random.Generator, given: Given) -> Request:
    names = ["../../etc/cron.d/x.png", "/etc/passwd.png", "..\\..\\x.png", "a/../../x.png", "x.png"]
    return _lesson(_zip([(names[random.integers(len(names))], given.image)]))


def _bad_names(random: np.random.Generator, given: Given) -> Request:
    name = NAMES[random.integers(len(NAMES))]
    if name.startswith(".."):
        return "POST", "/classes/rename", {"json": {"name": name, "to": "x"}}
    return "POST", "/learn", {"data": {"name": name}, "files": [("images", ("x.png", given.image))]}


def _unicode_names(random: np.random.Generator, given: Given) -> Request:
    """Letters that cannot be seen, said or encoded."""
    letters = ["\u200b", "\u202e", "\ufeff", "\uffff", "\ue000", "\U000e0041", "\ud800"]
    name = "owl" + letters[random.integers(len(letters))]
    if name.endswith("\ud800") or random.random() < 0.5:
        body = json.dumps({"name": given.classes[0], "to": name})
        return "POST", "/classes/rename", {"content": body, "headers": _kind("application/json")}
    return _lesson(_zip([(f"{name}/1.png", given.image)]))


def _same_names(random: np.random.Generator, given: Given) -> Request:
    """Two classes that would have the same name as soon as it is said."""
    one, other = given.classes[0], given.classes[random.integers(1, len(given.classes))]
    if random.random() < 0.5:
        return "POST", "/classes/rename", {"json": {"name": one, "to": other.replace(" ", "_")}}
    pairs = [("red_owl", "red owl"), ("owl", " owl"), ("owl", "owl_"), ("red owl", "red  owl")]
    return _lesson(_zip([(f"{n}/1.png", given.image) for n in pairs[random.integers(len(pairs))]]))


def _empty_class(random: np.random.Generator, given: Given) -> Request:
    names = ["owl", given.classes[0], "フクロウ"]
    field = ("name", (None, names[random.integers(len(names))]))
    return "POST", "/learn", {"files": [field]}


def _empty_zip(random: np.random.Generator, given: Given) -> Request:
    members = [[], [("owl/", b"")], [("owl/readme.txt", b"hello")], [("owl/1.png", b"")]]
    return _lesson(_zip(members[random.integers(4)]))


def _cut_zip(random: np.random.Generator, given: Given) -> Request:
    data = _zip([("owl/1.png", given.image)])
    return _lesson(data[: int(random.integers(0, len(data) - 1))])


def _many_members(random: np.random.Generator, given: Given) -> Request:
    return _lesson(_zip([(f"owl/{n}.png", b"x") for n in range(60)]))


def _folder_outside(random: np.random.Generator, given: Given) -> Request:
    places = ["..", "../..", "/etc", "/", "~", "nowhere", "x\x00y", "a" * 9000, "."]
    return "POST", "/learn", {"json": {"folder": places[random.integers(len(places))]}}


def _unknown_route(random: np.random.Generator, given: Given) -> Request:
    paths = ["/nothing", "/jobs/none", "/versions/abc", "/../etc/passwd", "/predict/x", "/%00"]
    return "GET", paths[random.integers(len(paths))], {}


def _unknown_version(random: np.random.Generator, given: Given) -> Request:
    number = int(random.integers(1000, 2**31))
    if random.random() < 0.5:
        return "GET", f"/versions/{number * 10**9}", {}
    return "POST", "/rollback", {"json": {"version": number}}


def _unknown_class(random: np.random.Generator, given: Given) -> Request:
    name = "".join(chr(int(c)) for c in random.integers(0x20, 0xD000, 8))
    if random.random() < 0.5:
        return "POST", "/classes/remove", {"json": {"name": name}}
    return "POST", "/classes/rename", {"json": {"name": name, "to": "owl"}}


def _wrong_method(random: np.random.Generator, given: Given) -> Request:
    return ["GET", "PUT", "DELETE", "PATCH"][random.integers(4)], "/predict", {}


def _large_body(random: np.random.Generator, given: Given) -> Request:
    size = STRICT["max_body"] + int(random.integers(1, 1000))
    path = ["/predict", "/learn", "/rollback"][random.integers(3)]
    return "POST", path, {"content": bytes(size), "headers": _kind("application/octet-stream")}


def _odd_content(random: np.random.Generator, given: Given) -> Request:
    kinds = ["text/plain", "application/xml", "", "multipart/form-data", "é/ü", "image"]
    kind = kinds[random.integers(len(kinds))].encode()
    return "POST", "/predict", {"content": b"hello", "headers": {b"Content-Type": kind}}


def _bad_form(random: np.random.Generator, given: Given) -> Request:
    head = _kind("multipart/form-data; boundary=x")
    data = random.bytes(int(random.integers(0, 500)))
    return "POST", ["/predict", "/learn"][random.integers(2)], {"content": data, "headers": head}


def _wrong_token(random: np.random.Generator, given: Given) -> Request:
    token = given.token.encode()
    cut = int(random.integers(1, len(token)))
    said = [
        b"", b"Bearer ", token, b"Basic " + token, b"Bearer " + token[:cut],
        b"Bearer " + token + token[-cut:], b"Bearer " + token.upper(), b"Bearer \xff\xfe\x80",
        b"Bearer " + random.bytes(20_000).hex().encode(),
    ]  # fmt: skip
    verb, path = [("POST", "/predict"), *FOR_TEACHERS][random.integers(len(FOR_TEACHERS) + 1)]
    return verb, path, {"headers": {b"Authorization": said[random.integers(len(said))]}}


def _weak_token(random: np.random.Generator, given: Given) -> Request:
    """Somebody who may only ask wants to change something."""
    verb, path = FOR_TEACHERS[random.integers(len(FOR_TEACHERS))]
    return verb, path, {"headers": _bearer(given.token)}


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def _kind(kind: str) -> dict[str, str]:
    return {"Content-Type": kind}
