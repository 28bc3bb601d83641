"""A service from another program, with the method names of `Learner`."""

import base64
import io
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dosapp.data.files import SUFFIXES, warn_of_unread_images
from dosapp.errors import DosappError, InputError
from dosapp.runtime.extras import missing_extra

Progress = Callable[[dict[str, Any]], None]


class RequestError(DosappError):
    """The service answered with an error.

    Attributes:
        code: The HTTP status.
        request_id: Finds the request in the service's log.
    """

    def __init__(self, message: str, code: int, request_id: str = "") -> None:
        super().__init__(message)
        self.code, self.request_id = code, request_id


class InvalidRequestError(RequestError, InputError):
    """The service answered 4xx because of the request itself: not 409 (replica), 429 (busy)."""


class Client:
    """A connection to a service.

    Args:
        url: Where the service listens.
        token: Of `dosapp token add`, if the service has tokens.
        timeout: Seconds until an answer must come.

    Raises:
        InputError: The packages of `dosapp[serve]` are missing.

    Example:
        >>> with Client("http://127.0.0.1:8000") as client:
        ...     client.predict(["fox.jpg"])  # doctest: +SKIP
    """

    def __init__(self, url: str, token: str | None = None, timeout: float = 60.0) -> None:
        try:
            import httpx2
        except ImportError as error:
            raise missing_extra("the client", "serve", error) from error
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._transport_error = httpx2.TransportError
        self._http = httpx2.Client(base_url=url, headers=headers, timeout=timeout)
        self.url = url

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    # Predictions

    def predict(self, images: Any, top: int = 5, learn: bool = True) -> dict[str, Any]:
        """Classify images.

        Args:
            images: Paths, bytes of image files, Pillow images, or `uint8 [H, W, 3]` arrays; one
                alone as well as many.
            top: How many of the best classes to report per image.
            learn: Whether the service may adapt to the images.

        Returns:
            `{"version": …, "predictions": […]}`.
        """
        images = [images] if _is_one_image(images) else images
        files = [("images", (name, data)) for name, data in map(_read_image, images)]
        query = {"top": top, "learn": learn}
        result: dict[str, Any] = self._request("POST", "/predict", files=files, params=query)
        return result

    def classes(self) -> list[str]:
        """Return all classes of the version that answers."""
        names: list[str] = self._request("GET", "/classes")["classes"]
        return names

    def status(self) -> dict[str, Any]:
        """Return the live state of the service."""
        status: dict[str, Any] = self._request("GET", "/status")
        return status

    # Sessions and corrections

    def learn(
        self,
        session: "Mapping[str, Sequence[Any]] | Path | str | None" = None,
        wait: bool = True,
        on_progress: Progress = lambda job: None,
        lr: float | None = None,
        epochs: int | None = None,
    ) -> dict[str, Any]:
        """Train a session.

        Args:
            session: Images by class name, a zip of class folders, or a folder of them; None for
                the corrections that wait.
            wait: Whether to wait until the session has ended.
            on_progress: Called with the job while it waits.
            lr: Learning rate of this session, if another than the learner's.
            epochs: Passes over the images of this session, if another number than the learner's.

        Returns:
            The job; its `state` is `done` if there is a new version.
        """
        given = (("lr", lr), ("epochs", epochs))
        options = {name: value for name, value in given if value is not None}
        if session is None:
            job = self._request("POST", "/learn", json={}, params=options)
            return self._wait_for(job, wait, on_progress)
        return self.learn_zip(_zip_session(session), wait, on_progress, options)

    def learn_zip(
        self,
        archive: bytes,
        wait: bool = True,
        on_progress: Progress = lambda job: None,
        options: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Train a session from a zip of class folders.

        Args:
            archive: The bytes of the zip.
            wait: Return when the session is over.
            on_progress: Called with the job while waiting.
            options: `lr` and `epochs`, if others than the learner's.

        Returns:
            The job.
        """
        files = [("archive", ("session.zip", archive))]
        job = self._request("POST", "/learn", files=files, params=dict(options or {}))
        return self._wait_for(job, wait, on_progress)

    def _wait_for(self, job: dict[str, Any], wait: bool, on_progress: Progress) -> dict[str, Any]:
        pause = 0.1
        while wait and job["state"] in ("waiting", "learning"):
            time.sleep(pause)
            pause = min(1.5 * pause, 2.0)  # a long session does not fill the service's log
            job = self.job(job["id"])
            on_progress(job)
        return job

    def job(self, name: str) -> dict[str, Any]:
        """Return a job by its id."""
        job: dict[str, Any] = self._request("GET", f"/jobs/{name}")
        return job

    def cancel(self, name: str) -> dict[str, Any]:
        """Cancel a session by the id of its job."""
        job: dict[str, Any] = self._request("POST", f"/jobs/{name}/cancel")
        return job

    def correct(self, image: Any, label: str, new_class: bool = False) -> int:
        """Give the true class of an image; return how many corrections wait for a session.

        Args:
            image: A path, bytes of an image file, or a Pillow image.
            label: The class.
            new_class: Confirms that the service does not know the class yet.
        """
        data = base64.b64encode(_read_image(image)[1]).decode()
        body = {"image": data, "label": label, "new_class": new_class}
        waiting: int = self._request("POST", "/correct", json=body)["waiting"]
        return waiting

    def forget_corrections(self) -> int:
        """Drop the corrections that wait; return how many there were."""
        count: int = self._request("POST", "/correct/forget")["forgotten"]
        return count

    # Classes and versions; each change returns the number of the new version

    def rename(self, name: str, to: str) -> int:
        """Rename a class.

        Args:
            name: A known class.
            to: Its new name.

        Returns:
            The new version.
        """
        return self._change("/classes/rename", {"name": name, "to": to})

    def remove(self, name: str) -> int:
        """Remove a class."""
        return self._change("/classes/remove", {"name": name})

    def versions(self) -> list[dict[str, Any]]:
        """Return all versions, the oldest first."""
        query = {"last": 10_000}
        versions: list[dict[str, Any]] = self._request("GET", "/versions", params=query)
        return versions

    def rollback(self, version: int) -> int:
        """Restore a version as a new version."""
        return self._change("/rollback", {"version": version})

    def freeze(self) -> str:
        """Stop adaptation; return why a restart would not know it, "" if it will."""
        trouble: str = self._request("POST", "/freeze")["trouble"]
        return trouble

    def unfreeze(self) -> str:
        """Start adaptation again; return why a restart would not know it, "" if it will."""
        trouble: str = self._request("POST", "/unfreeze")["trouble"]
        return trouble

    def wait(self, seconds: float = 60.0) -> None:
        """Wait until the service is ready.

        Raises:
            DosappError: It was not ready in time.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._request("GET", "/ready")
                return
            except DosappError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _change(self, path: str, body: Mapping[str, Any]) -> int:
        version: int = self._request("POST", path, json=dict(body))["version"]
        return version

    def _request(self, method: str, path: str, **options: Any) -> Any:
        try:
            response = self._http.request(method, path, **options)
        except self._transport_error as error:
            raise InputError(
                f"no service answers at {self.url} ({error}); is it running?"
            ) from error
        if response.status_code < 400:
            return response.json()
        try:
            message = response.json()["error"]
        except (ValueError, KeyError, TypeError):
            message = response.text[:200]
        is_input = response.status_code < 500 and response.status_code not in (409, 429)
        kind = InvalidRequestError if is_input else RequestError
        raise kind(message, response.status_code, response.headers.get("x-request-id", ""))


def _is_one_image(images: Any) -> bool:
    """Whether an image was given without a list around it."""
    if isinstance(images, str | bytes | Path | Image.Image):
        return True
    return isinstance(images, np.ndarray) and images.ndim < 4


def _read_image(image: Any) -> tuple[str, bytes]:
    """The file name and the bytes of an image."""
    if isinstance(image, bytes):
        return "image", image
    if isinstance(image, str | Path):
        try:
            return Path(image).name, Path(image).read_bytes()
        except OSError as error:
            raise InputError(f"'{image}' cannot be read ({error.strerror})") from error
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            shape = f"{image.dtype} {list(image.shape)}"
            raise InputError(f"an array is {shape}; give images as uint8 [H, W, 3]")
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        kind = type(image).__name__
        raise InputError(f"an image is a {kind}; give a path, bytes, a Pillow image or an array")
    with io.BytesIO() as buffer:
        image.save(buffer, "PNG")
        return "image.png", buffer.getvalue()


def _zip_session(session: "Mapping[str, Sequence[Any]] | Path | str") -> bytes:
    is_folder = isinstance(session, str | Path)
    if isinstance(session, str | Path):
        path = Path(session)
        if path.is_file():
            return path.read_bytes()
        if not path.is_dir():
            raise InputError(f"'{path}' does not exist; give a zip or a folder of class folders")
        warn_of_unread_images(path)
        session = {
            folder.name: sorted(
                file
                for file in folder.iterdir()
                if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
            )
            for folder in sorted(path.iterdir())
            if folder.is_dir() and not folder.name.startswith(".")
        }
    with io.BytesIO() as buffer:
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, images in session.items():
                if "/" in name or "\\" in name:
                    raise InputError(f"the class name '{name}' has a slash; leave it out")
                for n, (title, data) in enumerate(map(_read_image, images)):
                    # Files of a folder keep their names, since errors tell them.
                    numbered = f"{n:05d}{Path(title).suffix or '.png'}"
                    archive.writestr(f"{name}/{title if is_folder else numbered}", data)
        return buffer.getvalue()
