"""The service's verbs from another program: the same words as `Learner`'s."""

import base64
import io
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dosapp.errors import DosappError, InputError
from dosapp.runtime.extras import missing_extra


class RequestError(DosappError):
    """The service said no; `code` is the status of its answer."""

    def __init__(self, words: str, code: int) -> None:
        super().__init__(words)
        self.code = code


class Client:
    """`Client("http://127.0.0.1:8000").predict(["fox.jpg"])`"""

    def __init__(self, url: str, token: str | None = None, timeout: float = 60.0) -> None:
        try:
            import httpx2
        except ImportError as error:
            raise missing_extra("the client", "serve", error) from error
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._errors = httpx2.TransportError
        self._http = httpx2.Client(base_url=url, headers=headers, timeout=timeout)
        self.url = url

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # Asking

    def predict(self, images: Sequence[Any], top: int = 5, learn: bool = True) -> dict[str, Any]:
        """Files, bytes or Pillow images → `{"version": …, "predictions": […]}`."""
        files = [("images", (name, data)) for name, data in map(_read, images)]
        query = {"top": top, "learn": learn}
        found: dict[str, Any] = self._ask("POST", "/predict", files=files, params=query)
        return found

    def classes(self) -> list[str]:
        found: list[str] = self._ask("GET", "/classes")["classes"]
        return found

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("GET", "/status")
        return found

    # LearningService

    def learn(
        self,
        lesson: "Mapping[str, Sequence[Any]] | Path | str | None" = None,
        wait: bool = True,
        watch: Callable[[dict[str, Any]], None] = lambda job: None,
    ) -> dict[str, Any]:
        """Pictures by class name, or a zip of class folders, or a folder of them; with nothing,
        the corrections that wait. Returns the job, when it has ended unless told otherwise."""
        if lesson is None:
            return self._ended(self._ask("POST", "/learn", json={}), wait, watch)
        return self.learn_zip(_zipped(lesson), wait, watch)

    def learn_zip(
        self,
        archive: bytes,
        wait: bool = True,
        watch: Callable[[dict[str, Any]], None] = lambda job: None,
    ) -> dict[str, Any]:
        """The same from the bytes of a zip."""
        files = [("archive", ("lesson.zip", archive))]
        return self._ended(self._ask("POST", "/learn", files=files), wait, watch)

    def _ended(
        self, job: dict[str, Any], wait: bool, watch: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any]:
        while wait and job["state"] in ("waiting", "learning"):
            time.sleep(0.1)
            job = self.job(job["id"])
            watch(job)
        return job

    def job(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("GET", f"/jobs/{name}")
        return found

    def cancel(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("POST", f"/jobs/{name}/cancel")
        return found

    def correct(self, image: Any, label: str) -> int:
        """Says how many corrections wait for the next session."""
        text = base64.b64encode(_read(image)[1]).decode()
        found: int = self._ask("POST", "/correct", json={"image": text, "label": label})["waiting"]
        return found

    def forget_corrections(self) -> int:
        """Says how many had waited."""
        found: int = self._ask("POST", "/correct/forget")["forgotten"]
        return found

    def rename(self, name: str, to: str) -> int:
        return self._version("/classes/rename", {"name": name, "to": to})

    def remove(self, name: str) -> int:
        return self._version("/classes/remove", {"name": name})

    # Versions

    def versions(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("GET", "/versions", params={"last": 10_000})
        return found

    def rollback(self, version: int) -> int:
        return self._version("/rollback", {"version": version})

    def freeze(self) -> str:
        """Says why a restart would not know it, if the disk is full."""
        found: str = self._ask("POST", "/freeze")["trouble"]
        return found

    def unfreeze(self) -> str:
        found: str = self._ask("POST", "/unfreeze")["trouble"]
        return found

    def wait(self, seconds: float = 60.0) -> None:
        """Until the service is ready."""
        until = time.monotonic() + seconds
        while True:
            try:
                self._ask("GET", "/ready")
                return
            except DosappError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def _version(self, path: str, body: Mapping[str, Any]) -> int:
        found: int = self._ask("POST", path, json=dict(body))["version"]
        return found

    def _ask(self, verb: str, path: str, **more: Any) -> Any:
        try:
            answer = self._http.request(verb, path, **more)
        except self._errors as error:
            raise InputError(
                f"no service answers at {self.url} ({error}); is it running?"
            ) from error
        if answer.status_code >= 400:
            try:
                words = answer.json()["error"]
            except (ValueError, KeyError):
                words = answer.text[:200]
            raise RequestError(words, answer.status_code)
        return answer.json()


def _read(image: Any) -> tuple[str, bytes]:
    if isinstance(image, bytes):
        return "picture", image
    if isinstance(image, str | Path):
        try:
            return Path(image).name, Path(image).read_bytes()
        except OSError as error:
            raise InputError(f"'{image}' cannot be read ({error.strerror})") from error
    with io.BytesIO() as buffer:
        image.save(buffer, "PNG")
        return "picture.png", buffer.getvalue()


def _zipped(lesson: "Mapping[str, Sequence[Any]] | Path | str") -> bytes:
    if isinstance(lesson, str | Path):
        place = Path(lesson)
        if place.is_file():
            return place.read_bytes()
        if not place.is_dir():
            raise InputError(f"'{place}' does not exist; give a zip or a folder of class folders")
        lesson = {
            inner.name: sorted(p for p in inner.iterdir() if p.is_file())
            for inner in sorted(place.iterdir())
            if inner.is_dir() and not inner.name.startswith(".")
        }
    with io.BytesIO() as buffer:
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, images in lesson.items():
                if "/" in name or "\\" in name:
                    raise InputError(f"the class name '{name}' has a slash; leave it out")
                for n, (title, data) in enumerate(map(_read, images)):
                    suffix = Path(title).suffix or ".png"
                    archive.writestr(f"{name}/{n:05d}{suffix}", data)
        return buffer.getvalue()
