"""A session of a service: how it trains, and what became of it."""

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dosapp.scenario import Session


@dataclass(frozen=True)
class SessionOptions:
    """How one session trains."""

    lr: float | None = None  # None: the learner's
    epochs: int | None = None
    # The last images of a class that are never kept for the canary: its corrections.
    must_train: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Job:
    """A session that waits, trains or has ended."""

    classes: list[str]
    images: int
    caller: str
    session: Session | None
    on_failure: Callable[[], None]  # gives back the corrections that were taken for it
    options: SessionOptions
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: Literal["waiting", "learning", "done", "refused", "failed", "cancelled"] = "waiting"
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    version: int | None = None
    message: str = ""
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def end(self, state: Literal["done", "refused", "failed", "cancelled"], message: str) -> None:
        """Set the final state and release the images."""
        if state != "done":
            self.on_failure()
        self.state, self.message = state, message
        self.session, self.on_failure = None, lambda: None
        self.ended.set()

    def to_dict(self) -> dict[str, Any]:
        """Return the job as JSON, by the names of the HTTP interface."""
        names = ("id", "state", "classes", "images", "step", "loss", "version")
        values = {name: getattr(self, name) for name in names}
        return {**values, "of": self.total_steps, "said": self.message}


def list_open_jobs(jobs: Iterable[Job]) -> list[Job]:
    """The jobs that wait or train, and those refused or failed since the last one that was learned.

    Args:
        jobs: All that are known, the oldest first.
    """
    unsuccessful: list[Job] = []
    unfinished: list[Job] = []
    for job in jobs:
        if job.state == "done":
            unsuccessful = []
        elif job.state in ("refused", "failed"):
            unsuccessful.append(job)
        elif job.state != "cancelled":
            unfinished.append(job)
    return unsuccessful + unfinished


class SessionCancelledError(Exception):
    """A session was cancelled between two steps."""
