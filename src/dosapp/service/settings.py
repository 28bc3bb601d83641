"""Settings of a service. Imports no torch, so that `dosapp --help` is quick."""

import ipaddress
from pathlib import Path
from typing import Literal

from pydantic import Field

from dosapp.errors import InputError
from dosapp.settings import Settings


class ServiceSettings(Settings):
    """How a learner is served, what it accepts, and how far it trusts its own stream.

    Example:
        >>> ServiceSettings(adapt=False).batch_size
        32
    """

    aliases = {
        "batch": "batch_size",
        "unknown": "unknown_threshold",
        "adapt_batch": "adapt_batch_size",
        "keep": "keep_versions",
        "disagreement": "max_disagreement",
        "skew": "max_skew",
        "strikes": "max_refusals",
        "gate": "confidence_gate",
        "skew_aware": "skew_aware_ema",
        "body": "max_body",
        "pixels": "max_pixels",
        "images": "max_images",
        "lesson_images": "max_session_images",
        "queue": "max_queue",
        "orders": "max_pending",
        "jobs": "max_jobs",
        "requests": "max_requests",
        "rate": "max_rate",
        "classes": "max_classes",
        "lessons": "session_folder",
    }

    batch_size: int = Field(32, ge=1, description="images answered at once")
    batch_wait: float = Field(0.003, ge=0, description="seconds the first image of a batch waits")
    unknown_threshold: float = Field(
        0.0, ge=0, le=1, description="score below which the answer is 'unknown'"
    )

    adapt: bool = Field(True, description="adapt to the images that are predicted")
    adapt_batch_size: int = Field(64, ge=2, description="images per step on the stream")
    adapt_wait: float = Field(30.0, gt=0, description="seconds until a smaller batch is used")
    interval: int = Field(20, ge=1, description="steps on the stream per version")
    interval_wait: float = Field(60.0, gt=0, description="idle seconds until a version is written")
    keep_versions: int = Field(200, ge=1, description="versions kept; older ones are merged")

    canary: Path | None = Field(None, description="labelled images in class folders, never trained")
    canary_share: float = Field(
        0.2, ge=0, le=0.5, description="share of a session kept for the canary, and stored; 0: none"
    )
    require_canary: bool = Field(
        True, description="adapt only while the canary has images of every class"
    )
    canary_margin: float = Field(
        0.1, ge=0, description="log-odds that the canary's mean margin may fall on the stream"
    )
    canary_pull: float = Field(
        3.0,
        ge=0,
        description="log-odds a class may gain on the canary's other images; half if margins stay",
    )
    canary_drop: float = Field(2.0, ge=0, description="points the canary may lose on the stream")
    session_drop: float = Field(10.0, ge=0, description="points a session may cost the canary")
    max_disagreement: float = Field(
        0.05, gt=0, le=1, description="share of a batch on which the experts may disagree"
    )
    max_skew: float = Field(0.9, gt=0, le=1, description="class skew above which a batch is held")
    max_caller_share: float = Field(
        0.5, ge=0.5, le=1, description="share of a step from a suspected caller, while others send"
    )
    confidence_gate: float | None = Field(None, ge=0, lt=1, description="overrides the learner's")
    skew_aware_ema: bool | None = Field(None, description="overrides the learner's")
    max_refusals: int = Field(
        3, ge=1, description="refusals until it freezes or leaves a caller out"
    )

    token: bool = Field(True, description="callers need a token; without, only this machine")
    max_body: int = Field(64_000_000, ge=1, description="bytes of a request")
    max_pixels: int = Field(40_000_000, ge=1, description="pixels of one image")
    max_request_pixels: int = Field(
        500_000_000, ge=1, description="pixels of all images in a request to predict"
    )
    max_images: int = Field(256, ge=1, description="images in a request to predict")
    max_session_images: int = Field(20_000, ge=1, description="images in a session")
    max_session_classes: int = Field(1000, ge=1, description="classes in a session")
    max_queue: int = Field(1024, ge=1, description="images waiting for an answer or for a step")
    max_caller_queue: int = Field(
        256, ge=1, description="images of one caller waiting for an answer"
    )
    max_pending: int = Field(8, ge=1, description="rollbacks and the like waiting for the writer")
    max_jobs: int = Field(8, ge=1, description="sessions waiting for the writer")
    max_requests: int = Field(128, ge=1, description="concurrent requests")
    max_caller_requests: int = Field(32, ge=1, description="concurrent requests of one caller")
    max_connections: int = Field(512, ge=1, description="open connections; idle ones make room")
    header_timeout: float = Field(10.0, gt=0, description="seconds until a request's headers come")
    body_timeout: float = Field(
        20.0, gt=0, description="seconds until a body comes, and one more per 20 kB"
    )
    max_rate: float = Field(0.0, ge=0, description="requests per second of a caller; 0: no limit")
    max_classes: int = Field(10_000, ge=1, description="classes in all")
    session_folder: Path | None = Field(None, description="folder of sessions on the server")
    backbone: str | None = Field(
        None, description="where the learner's backbone is now, if it has moved"
    )
    device: str = Field("cpu", description="cpu, cuda, mps or auto")
    threads: int | None = Field(None, ge=1, description="of torch [half of the cores]")
    log_format: Literal["text", "json"] = Field("text", description="lines of the log on stderr")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe lines that are logged; info: every request"
    )


def check_learner(folder: Path) -> None:
    """Raise an `InputError` if the folder holds no learner."""
    if not (folder / "learner.json").exists():
        raise InputError(f"'{folder}' holds no learner; make one with: dosapp new {folder}")


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
