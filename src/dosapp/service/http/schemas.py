"""Request and response bodies, as `/openapi.json` describes them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Schema(BaseModel):
    """Base of all bodies: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


class ErrorResponse(Schema):
    """The answer to every request that fails."""

    error: str = Field(description="one sentence: what, which value, what would work")
    request_id: str = Field(description="the X-Request-Id of the answer, also in the log")


# Predictions


class PredictRequest(Schema):
    """Images as JSON."""

    images: list[str] = Field(min_length=1, description="base64, or data: URLs")


class ScoredLabel(Schema):
    """A class and its score."""

    label: str
    score: float


class PredictionItem(ScoredLabel):
    """The prediction for one image."""

    known: bool = Field(description="false if the score is below the setting unknown_threshold")
    top: list[ScoredLabel]


class PredictResponse(Schema):
    """Predictions in the order of the images."""

    version: int = Field(description="the version that made all of them")
    predictions: list[PredictionItem]


# Sessions and corrections


class LearnRequest(Schema):
    """A session without an upload; an empty body takes the corrections that wait."""

    folder: str | None = Field(None, description="of class folders, below session_folder")


class JobResponse(Schema):
    """A session that waits, trains or has ended."""

    id: str
    state: Literal["waiting", "learning", "done", "refused", "failed", "cancelled"]
    classes: list[str]
    images: int
    step: int = Field(description="the last training step that was taken")
    of: int = Field(description="training steps in all")
    loss: float | None = Field(description="of the last step")
    version: int | None = Field(description="the version it made, when it is done")
    said: str = Field(description="how it ended")


class CorrectRequest(Schema):
    """An image and its true class."""

    image: str = Field(description="base64, or a data: URL")
    label: str = Field(min_length=1)
    new_class: bool = Field(False, description="confirms a class that is not known yet")


class CorrectResponse(Schema):
    """The corrections that wait for the next session."""

    waiting: int


class ForgetResponse(Schema):
    """The corrections that were dropped."""

    forgotten: int


# Classes and versions


class ClassesResponse(Schema):
    """All classes of the version that answers."""

    version: int
    classes: list[str]


class RenameRequest(Schema):
    """A class and its new name."""

    name: str
    to: str


class RemoveRequest(Schema):
    """A class to be removed."""

    name: str


class RollbackRequest(Schema):
    """A version to go back to."""

    version: int = Field(ge=1, le=2**31, strict=True)


class ChangeResponse(Schema):
    """The version that a change made."""

    version: int


class RollbackResponse(ChangeResponse):
    """The version that a rollback made."""

    note: str = Field("", description="what became of the corrections that waited")


class VersionSummary(Schema):
    """A version in the list."""

    number: int
    created: str = Field(description="ISO 8601")
    reason: str
    checksum: str
    size: int = Field(description="bytes on disk")
    class_count: int
    seen: dict[str, Any] = Field(description="measured when it was written: drift, canary, …")


class VersionResponse(VersionSummary):
    """One version."""

    classes: list[str]
    parent: str = Field(description="checksum of the version before it")


# Operation


class FreezeResponse(Schema):
    """Whether adaptation is stopped."""

    frozen: bool
    trouble: str = Field(description="why a restart would not know it; empty if it will")


class AuditEntry(Schema):
    """A line of the audit log; fields after `what` depend on the event."""

    model_config = ConfigDict(extra="allow")

    when: str
    who: str
    what: str
    version: int | None = None
    job: str | None = None
    classes: list[str] | None = None
    images: int | None = None
    name: str | None = Field(None, alias="class")
    to: int | str | None = Field(None, description="a version, or a new class name")
    why: str | None = None


class CanaryPoint(Schema):
    """Accuracy on the canary when a version was written."""

    version: int
    accuracy: float = Field(description="per cent")


class SignalsResponse(Schema):
    """Live signals of the stream, over its last 50 steps."""

    histogram: dict[str, int] = Field(description="predicted labels and their counts")
    skew: float
    disagreement: float | None = Field(description="share of images on which experts disagree")
    confidence: float | None
    drift: float = Field(description="L2 distance of the weights from the last session")
    canary: list[CanaryPoint]
    adapted: int = Field(description="images used in a step")
    skipped: int = Field(description="images dropped because the queue was full or emptied")
    held: int = Field(description="images held back by the guard or the confidence gate")
    refused: int = Field(description="intervals that were not published")


class StatusResponse(Schema):
    """The live state. A replica has only the fields up to `writes`."""

    version: int
    classes: int
    answered: int = Field(description="images, since the start")
    waiting: int = Field(description="images that wait for a prediction")
    seconds: float = Field(description="since the start")
    writes: bool = Field(description="false: a replica")
    adapts: bool = Field(False, description="whether the service learns from its stream")
    adaptation_off: str = Field("", description="why no guard could notice harm; empty if one can")
    frozen: str = Field("", description="why adaptation is stopped; empty if it is not")
    left_out: list[str] = Field(
        [], description="callers whose images are not learned from until the next session"
    )
    trouble: str = Field("", description="the last error of the writer; empty if there is none")
    stream: int = Field(0, description="images in the queue of the stream")
    corrections: int = 0
    at_work: bool = Field(True, description="whether reader and writer run")
    signals: SignalsResponse | None = None
    jobs: list[JobResponse] = Field(
        [],
        description="sessions that wait or train; refused and failed ones since the last success",
    )


class HealthResponse(Schema):
    """The process answers."""

    ok: bool


class ReadyResponse(Schema):
    """Reader and writer run."""

    ready: bool
    version: int
