"""What is asked and answered, as the interface describes it."""

from pydantic import BaseModel, ConfigDict, Field


class Schema(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorResponse(Schema):
    error: str = Field(description="one sentence: what, which value, what would work")


class ScoredLabel(Schema):
    label: str
    score: float


class PredictionItem(ScoredLabel):
    known: bool = Field(description="false if the score was below the service's 'unknown'")
    top: list[ScoredLabel]


class PredictResponse(Schema):
    version: int = Field(description="the version that answered, all of it")
    predictions: list[PredictionItem]


class PredictRequest(Schema):
    images: list[str] = Field(min_length=1, description="base64, or data: URLs")


class LearnRequest(Schema):
    folder: str | None = Field(None, description="below the service's folder of lessons")


class CorrectRequest(Schema):
    image: str = Field(description="base64, or a data: URL")
    label: str = Field(min_length=1)


class RenameRequest(Schema):
    name: str
    to: str


class RemoveRequest(Schema):
    name: str


class RollbackRequest(Schema):
    version: int = Field(ge=1, le=2**31)
