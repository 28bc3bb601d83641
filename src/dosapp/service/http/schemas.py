"""What is asked and answered, as the interface describes it."""

from pydantic import BaseModel, ConfigDict, Field


class Said(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Error(Said):
    error: str = Field(description="one sentence: what, which value, what would work")


class ScoredLabel(Said):
    label: str
    score: float


class Prediction(ScoredLabel):
    known: bool = Field(description="false if the score was below the service's 'unknown'")
    top: list[ScoredLabel]


class Predictions(Said):
    version: int = Field(description="the version that answered, all of it")
    predictions: list[Prediction]


class Encoded(Said):
    images: list[str] = Field(min_length=1, description="base64, or data: URLs")


class Lesson(Said):
    folder: str | None = Field(None, description="below the service's folder of lessons")


class Correction(Said):
    image: str = Field(description="base64, or a data: URL")
    label: str = Field(min_length=1)


class Rename(Said):
    name: str
    to: str


class Name(Said):
    name: str


class Back(Said):
    version: int = Field(ge=1, le=2**31)
