"""What a service is, as checked values. Imports no torch: `--help` must be quick."""

import ipaddress
from pathlib import Path

from pydantic import Field

from dosapp.errors import InputError
from dosapp.settings import Settings


class ServiceSettings(Settings):
    """How a learner is served, and how far its own stream is trusted."""

    batch: int = Field(32, ge=1, description="pictures answered at once")
    batch_wait: float = Field(0.003, ge=0, description="seconds the first of a batch waits")
    unknown: float = Field(0.0, ge=0, le=1, description="score below which the answer is 'unknown'")

    adapt: bool = Field(True, description="learn from the pictures that were asked about")
    adapt_batch: int = Field(64, ge=2, description="pictures per step on the stream")
    adapt_wait: float = Field(30.0, gt=0, description="seconds until a smaller batch is used")
    interval: int = Field(20, ge=1, description="steps on the stream per version")
    interval_wait: float = Field(60.0, gt=0, description="idle seconds until a version is made")
    keep: int = Field(200, ge=1, description="versions kept; older ones are taken together")

    canary: Path | None = Field(
        None, description="labelled pictures in class folders, never taught"
    )
    canary_drop: float = Field(2.0, ge=0, description="points it may lose since the last session")
    session_drop: float = Field(10.0, ge=0, description="points a session may cost it")
    disagreement: float = Field(
        0.05, gt=0, le=1, description="share of a batch experts may differ on"
    )
    skew: float = Field(
        0.9, gt=0, le=1, description="of a batch's answers, above which it is not learned"
    )
    gate: float | None = Field(None, ge=0, lt=1, description="the learner's gate, if another")
    skew_aware: bool | None = Field(None, description="the learner's, if another")
    strikes: int = Field(3, ge=1, description="refused intervals in a row until adaptation stops")

    body: int = Field(64_000_000, ge=1, description="bytes of a request")
    pixels: int = Field(40_000_000, ge=1, description="pixels of one picture")
    images: int = Field(256, ge=1, description="pictures in a request to predict")
    lesson_images: int = Field(20_000, ge=1, description="pictures in a lesson")
    queue: int = Field(1024, ge=1, description="pictures that wait for an answer, or to be learned")
    orders: int = Field(8, ge=1, description="rollbacks and the like that wait for the writer")
    jobs: int = Field(8, ge=1, description="lessons that wait")
    requests: int = Field(128, ge=1, description="requests at once")
    rate: float = Field(0.0, ge=0, description="requests per second of one caller; 0: any")
    classes: int = Field(10_000, ge=1, description="classes in all")
    lessons: Path | None = Field(None, description="the folder that holds server-side lessons")
    device: str = Field("cpu", description="cpu, cuda, mps or auto, whatever it was taught on")
    threads: int | None = Field(None, ge=1, description="of torch; none: half of the cores")


def check_learner(folder: Path) -> None:
    if not (folder / "learner.json").exists():
        raise InputError(f"'{folder}' holds no learner: there is no learner.json in it")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
