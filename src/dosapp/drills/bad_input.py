"""Invalid requests: each must get a status meant for its kind, and nothing may change.

They carry the token of a caller who may teach, so that each is refused for what is wrong with it;
only the two kinds about tokens fail authentication. The first valid request must succeed, and after
every 50 invalid ones it must get the same answer again. The weights' digest is compared before and
after. The content of a request is drawn from a seed.
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

from dosapp.drills.service_process import encode_test_images, make_small_learner
from dosapp.learner.learner import Learner
from dosapp.runtime.rng import numpy_rng
from dosapp.service.service import open_service
from dosapp.service.settings import ServiceSettings
from dosapp.service.tokens import Tokens

Request = tuple[str, str, dict[str, Any]]  # HTTP method, path, arguments of httpx
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
class ValidInputs:
    """Parts of valid requests, from which invalid ones are made."""

    image: bytes
    classes: tuple[str, ...]  # that the learner knows
    token: str  # of a caller who may only predict


def drill(
    folder: Path, count: int = 2000, on_progress: Callable[[str], None] = lambda message: None
) -> dict[str, Any]:
    """Send invalid requests to a service in this process.

    Args:
        folder: Where a small learner is created.
        count: Number of invalid requests.
        on_progress: Called with a message after every 50 requests.

    Returns:
        The content of `bad-input.json`; `wrong` lists what should not have happened.
    """
    from starlette.testclient import TestClient

    from dosapp.service.http.app import build_app
    from dosapp.service.http.limits import Pacer

    scenario = make_small_learner(folder)
    images = encode_test_images(scenario)
    before = Learner.load(folder).digest()
    tokens = Tokens(folder)
    teacher = _bearer(tokens.add("teacher", "teach"))
    valid = ValidInputs(images[0], scenario.tasks[0].classes, tokens.add("guest", "predict"))
    settings: ServiceSettings = ServiceSettings.parse(
        {**STRICT, "adapt": False, "session_folder": folder / "versions"}
    )
    codes: Counter[str] = Counter()
    wrong: list[str] = []
    with open_service(folder, settings) as service:
        app = build_app(service)
        app.state.limits.refusals = Pacer(rate=1e6, burst=1e6)  # 20 per second would take minutes
        client = TestClient(app, "http://127.0.0.1", raise_server_exceptions=False, headers=teacher)

        def send_valid_request() -> Any:
            files = [("images", (f"{n}.png", data)) for n, data in enumerate(images[:2])]
            answer = client.post("/predict", files=files)
            return answer.status_code, answer.json()

        first = send_valid_request()
        if first[0] != 200:
            wrong.append(f"a valid request got {first[0]}: {first[1]}")
        for n, (kind, expected, (method, path, kwargs)) in enumerate(bad_requests(valid, count)):
            answer = client.request(method, path, **kwargs)
            codes[f"{kind}: {answer.status_code}"] += 1
            if answer.status_code not in expected:
                wrong.append(f"{kind}: {method} {path[:60]} got {answer.status_code}")
            if n % 50 == 49:
                on_progress(f"{n + 1} of {count} bad requests")
                if send_valid_request() != first:
                    wrong.append(f"after request {n + 1} a valid one got another answer")
    after = Learner.load(folder).digest()
    return {
        "requests": count,
        "honest_between": count // 50,
        "codes": dict(sorted(codes.items())),
        "wrong": wrong,
        "weights_unchanged": before == after,
    }


def bad_requests(valid: ValidInputs, count: int) -> Iterator[tuple[str, set[int], Request]]:
    """Yield the kind, the status codes meant for it, and a request; kinds alternate."""
    kinds: list[tuple[Callable[[np.random.Generator, ValidInputs], Request], set[int]]] = [
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
        make, expected = kinds[n % len(kinds)]
        yield make.__name__[1:].replace("_", " "), expected, make(numpy_rng("bad", n), valid)


def _upload(data: bytes, path: str = "/predict", name: str = "images") -> Request:
    return "POST", path, {"files": [(name, ("x.png", data))]}


def _post(path: str, content: str | bytes, content_type: str = "application/json") -> Request:
    return "POST", path, {"content": content, "headers": {"Content-Type": content_type}}


def _cut_image(rng: np.random.Generator, valid: ValidInputs) -> Request:
    return _upload(valid.image[: int(rng.integers(0, len(valid.image) // 2))])


def _flipped_image(rng: np.random.Generator, valid: ValidInputs) -> Request:
    data = bytearray(valid.image)
    for position in rng.integers(0, len(data), 40):
        data[position] ^= int(rng.integers(1, 256))
    data[:4] = b"\x89PNX"  # whatever the other changes do, this is no image format
    return _upload(bytes(data))


def _huge_image(rng: np.random.Generator, valid: ValidInputs) -> Request:
    """A header with more pixels than may be decoded."""
    side = int(rng.integers(5_000, 2**31 - 1))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk
    data += struct.pack(">I", zlib.crc32(chunk)) + valid.image[33:]
    return _upload(data)


def _no_image(rng: np.random.Generator, valid: ValidInputs) -> Request:
    return _upload(rng.bytes(int(rng.integers(0, 3000))))


def _not_base64(rng: np.random.Generator, valid: ValidInputs) -> Request:
    text = base64.b64encode(valid.image).decode()
    return "POST", "/predict", {"json": {"images": [text[:-3] + "*é%"]}}


def _wrong_types(rng: np.random.Generator, valid: ValidInputs) -> Request:
    values: list[Any] = [None, 3, -1.5, True, [], {}, [[]], [None], [{}], "x", 1e400]
    bodies: list[tuple[str, Any]] = [
        ("/predict", {"images": values[rng.integers(len(values))]}),
        ("/predict", {"pictures": ["x"]}),
        ("/rollback", {"version": ["x", None, -1, 0, 1.5, 10**30][rng.integers(6)]}),
        ("/correct", {"image": 3, "label": None}),
        ("/classes/rename", {"name": ["a"], "to": 3}),
        ("/classes/remove", {}),
        ("/learn", {"folder": 7}),
        ("/learn", {"folders": "x"}),
    ]
    path, body = bodies[rng.integers(len(bodies))]
    return _post(path, json.dumps(body))


def _bad_json(rng: np.random.Generator, valid: ValidInputs) -> Request:
    texts = [b"{", b"[" * 5000, b'{"images": NaN}', b"\xff\xfe", b'"\\ud800"', b"null", b"[]"]
    path = ["/predict", "/rollback", "/correct", "/classes/rename"][rng.integers(4)]
    return _post(path, texts[rng.integers(len(texts))])


def _tensor(data: bytes, shape: str, dtype: str = "float32") -> Request:
    method, path, kwargs = _post("/predict", data, "application/octet-stream")
    return method, path, {**kwargs, "params": {"shape": shape, "dtype": dtype}}


def _bad_tensor(rng: np.random.Generator, valid: ValidInputs) -> Request:
    return _tensor(rng.bytes(int(rng.integers(0, 12000))), "1,3,32,32")


def _nan_tensor(rng: np.random.Generator, valid: ValidInputs) -> Request:
    values = rng.random((1, 3, 32, 32)).astype("<f4")
    bad_value = [np.nan, np.inf, -np.inf, -0.5, 1e30][rng.integers(5)]
    values[0, 0, int(rng.integers(32)), 0] = bad_value
    return _tensor(values.tobytes(), "1,3,32,32")


def _wrong_shape(rng: np.random.Generator, valid: ValidInputs) -> Request:
    shapes = ["", "1", "1,3,32", "0,3,32,32", "-1,3,32,32", "1,3,64,64", "a,b,c,d", "1e9,3,32,32",
              "9" * 400 + ",3,32,32", "1,3,32,32,1"]  # fmt: skip
    return _tensor(bytes(3 * 32 * 32 * 4), shapes[rng.integers(len(shapes))])


def _zip(members: list[tuple[str, bytes]]) -> bytes:
    with io.BytesIO() as buffer:
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members:
                archive.writestr(name, data)
        return buffer.getvalue()


def _learn_zip(data: bytes) -> Request:
    return _upload(data, "/learn", "archive")


def _bomb(rng: np.random.Generator, valid: ValidInputs) -> Request:
    return _learn_zip(_zip([("owl/1.png", bytes(int(rng.integers(3, 60)) * 1_000_000))]))


def _traversal(rng: np.random.Generator, valid: ValidInputs) -> Request:
    names = ["../../etc/cron.d/x.png", "/etc/passwd.png", "..\\..\\x.png", "a/../../x.png", "x.png"]
    return _learn_zip(_zip([(names[rng.integers(len(names))], valid.image)]))


def _bad_names(rng: np.random.Generator, valid: ValidInputs) -> Request:
    name = NAMES[rng.integers(len(NAMES))]
    if name.startswith(".."):
        return "POST", "/classes/rename", {"json": {"name": name, "to": "x"}}
    return "POST", "/learn", {"data": {"name": name}, "files": [("images", ("x.png", valid.image))]}


def _unicode_names(rng: np.random.Generator, valid: ValidInputs) -> Request:
    """Characters that are invisible, unprintable or cannot be encoded."""
    characters = ["\u200b", "\u202e", "\ufeff", "\uffff", "\ue000", "\U000e0041", "\ud800"]
    name = "owl" + characters[rng.integers(len(characters))]
    if name.endswith("\ud800") or rng.random() < 0.5:
        return _post("/classes/rename", json.dumps({"name": valid.classes[0], "to": name}))
    return _learn_zip(_zip([(f"{name}/1.png", valid.image)]))


def _same_names(rng: np.random.Generator, valid: ValidInputs) -> Request:
    """Two classes whose names would make equal captions."""
    first, other = valid.classes[0], valid.classes[rng.integers(1, len(valid.classes))]
    if rng.random() < 0.5:
        return "POST", "/classes/rename", {"json": {"name": first, "to": other.replace(" ", "_")}}
    pairs = [("red_owl", "red owl"), ("owl", " owl"), ("owl", "owl_"), ("red owl", "red  owl")]
    return _learn_zip(_zip([(f"{n}/1.png", valid.image) for n in pairs[rng.integers(len(pairs))]]))


def _empty_class(rng: np.random.Generator, valid: ValidInputs) -> Request:
    names = ["owl", valid.classes[0], "フクロウ"]
    field = ("name", (None, names[rng.integers(len(names))]))
    return "POST", "/learn", {"files": [field]}


def _empty_zip(rng: np.random.Generator, valid: ValidInputs) -> Request:
    members = [[], [("owl/", b"")], [("owl/readme.txt", b"hello")], [("owl/1.png", b"")]]
    return _learn_zip(_zip(members[rng.integers(4)]))


def _cut_zip(rng: np.random.Generator, valid: ValidInputs) -> Request:
    data = _zip([("owl/1.png", valid.image)])
    return _learn_zip(data[: int(rng.integers(0, len(data) - 1))])


def _many_members(rng: np.random.Generator, valid: ValidInputs) -> Request:
    return _learn_zip(_zip([(f"owl/{n}.png", b"x") for n in range(60)]))


def _folder_outside(rng: np.random.Generator, valid: ValidInputs) -> Request:
    folders = ["..", "../..", "/etc", "/", "~", "nowhere", "x\x00y", "a" * 9000, "."]
    return "POST", "/learn", {"json": {"folder": folders[rng.integers(len(folders))]}}


def _unknown_route(rng: np.random.Generator, valid: ValidInputs) -> Request:
    paths = ["/nothing", "/jobs/none", "/versions/abc", "/../etc/passwd", "/predict/x", "/%00"]
    return "GET", paths[rng.integers(len(paths))], {}


def _unknown_version(rng: np.random.Generator, valid: ValidInputs) -> Request:
    number = int(rng.integers(1000, 2**31))
    if rng.random() < 0.5:
        return "GET", f"/versions/{number * 10**9}", {}
    return "POST", "/rollback", {"json": {"version": number}}


def _unknown_class(rng: np.random.Generator, valid: ValidInputs) -> Request:
    name = "".join(chr(int(c)) for c in rng.integers(0x20, 0xD000, 8))
    if rng.random() < 0.5:
        return "POST", "/classes/remove", {"json": {"name": name}}
    return "POST", "/classes/rename", {"json": {"name": name, "to": "owl"}}


def _wrong_method(rng: np.random.Generator, valid: ValidInputs) -> Request:
    return ["GET", "PUT", "DELETE", "PATCH"][rng.integers(4)], "/predict", {}


def _large_body(rng: np.random.Generator, valid: ValidInputs) -> Request:
    size = STRICT["max_body"] + int(rng.integers(1, 1000))
    path = ["/predict", "/learn", "/rollback"][rng.integers(3)]
    return _post(path, bytes(size), "application/octet-stream")


def _odd_content(rng: np.random.Generator, valid: ValidInputs) -> Request:
    types = ["text/plain", "application/xml", "", "multipart/form-data", "é/ü", "image"]
    content_type = types[rng.integers(len(types))].encode()
    return "POST", "/predict", {"content": b"hello", "headers": {b"Content-Type": content_type}}


def _bad_form(rng: np.random.Generator, valid: ValidInputs) -> Request:
    data = rng.bytes(int(rng.integers(0, 500)))
    path = ["/predict", "/learn"][rng.integers(2)]
    return _post(path, data, "multipart/form-data; boundary=eight-or-more")


def _wrong_token(rng: np.random.Generator, valid: ValidInputs) -> Request:
    token = valid.token.encode()
    cut = int(rng.integers(1, len(token)))
    values = [
        b"", b"Bearer ", token, b"Basic " + token, b"Bearer " + token[:cut],
        b"Bearer " + token + token[-cut:], b"Bearer " + token.upper(), b"Bearer \xff\xfe\x80",
        b"Bearer " + rng.bytes(20_000).hex().encode(),
    ]  # fmt: skip
    method, path = [("POST", "/predict"), *FOR_TEACHERS][rng.integers(len(FOR_TEACHERS) + 1)]
    return method, path, {"headers": {b"Authorization": values[rng.integers(len(values))]}}


def _weak_token(rng: np.random.Generator, valid: ValidInputs) -> Request:
    """A caller who may only predict requests a change."""
    method, path = FOR_TEACHERS[rng.integers(len(FOR_TEACHERS))]
    return method, path, {"headers": _bearer(valid.token)}


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}
