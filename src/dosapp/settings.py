"""What a learner and a run are, as checked values. Imports no torch: `--help` must be quick.

One description serves the command line, YAML files, `learner.json`, `result.json` and the hash
under which a result is kept. Flags win over files; unknown keys are errors.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dosapp.errors import InputError, unknown_name

PAPER_RATE = 7.5e-6
TUNED = Path(__file__).parent / "backbones" / "tiny" / "rates.yaml"  # chosen by `dosapp tune`


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str = "settings") -> Any:
        """The settings, or one sentence about the first thing wrong with them."""
        for key in values:
            if key not in cls.model_fields:
                raise unknown_name(f"key in {where}", str(key), cls.model_fields)
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            why = first["msg"].removeprefix("Value error, ")
            raise InputError(f"{name} is {first['input']!r}: {why[0].lower()}{why[1:]}") from error


class LearnerSettings(Settings):
    """What decides how a learner learns."""

    backbone: str = Field("tiny", description="tiny, ViT-B-16, a hub id, or a local folder")
    method: str = Field("dosapp", description="how it learns with labels: dosapp methods")
    adapt: str | None = Field(None, description="how it adapts without, if not by the method")
    options: dict[str, Any] = Field(default_factory=dict, description="settings of the method")
    caption: str = Field("", description="of a class, {} is its name; none: the dataset's own")
    memory: int = Field(0, ge=0, description="pictures kept for replay; 0 stores none")
    seed: int = Field(0, ge=0, description="order of images, halves of the test set, memory")
    lr: float | None = Field(None, gt=0, description="rate; none: tiny's tuned ones, else 7.5e-6")
    weight_decay: float = Field(0.2, ge=0, description="AdamW's, on the weights that move")
    epochs: int = Field(10, ge=1, description="passes over a session's lessons")
    batch: int = Field(64, ge=1, description="labelled images per step")
    rivals: bool = Field(False, description="contrast lessons with every known caption")

    stream_lr: float | None = Field(None, gt=0, description="rate without labels; none: the same")
    gate: float = Field(0.0, ge=0, lt=1, description="probability below which no image is learned")
    temper: bool = Field(False, description="scale the stream's rate by how sure the batch is")
    skew_aware: bool = Field(False, description="teachers follow slower on a skewed stream")
    readmit: float = Field(0.0, ge=0, lt=1, description="share of the mask lent to past sessions")
    readmit_every: int = Field(10, ge=1, description="stream steps before the next are lent it")

    device: str = Field("cpu", description="where it computes: cpu, cuda, mps, or auto")
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="of matrix products (autocast); weights and losses stay float32"
    )
    compile: bool = Field(False, description="compile the blocks with torch.compile")
    microbatch: int = Field(0, ge=0, description="images encoded at a time; 0: the whole batch")
    checkpointing: bool = Field(False, description="compute activations again in the backward")

    @field_validator("caption")
    @classmethod
    def _has_a_place_for_the_name(cls, caption: str) -> str:
        if caption and (caption.count("{}") != 1 or caption.count("{") != 1):
            raise ValueError("write {} once, where the name goes: 'a photo of a {}.'")
        return caption

    @property
    def rate(self) -> float:
        """The learning rate in force. The tiny backbone has rates from `dosapp tune`."""
        if self.lr is not None:
            return self.lr
        if self.backbone == "tiny" and TUNED.exists():
            rates: dict[str, float] = yaml.safe_load(TUNED.read_text())["rates"]
            if self.method in rates:
                return rates[self.method]
        return PAPER_RATE

    def resolved(self) -> Self:
        """With the learning rate written out, so that the settings say all that happens."""
        return self.model_copy(update={"lr": self.rate})


class RunSettings(LearnerSettings):
    """An experiment: a learner and the stream it lives on."""

    data: str = Field("shapes", description="dosapp datasets; a+b for one after the other")
    data_dir: Path | None = Field(None, description="a local copy of the paper's datasets")
    skip_bad_images: bool = Field(False, description="leave out what cannot be read, and count it")
    tasks: int = Field(10, ge=1, description="tasks in each dataset")
    classes: int | None = Field(None, ge=1, description="use only so many classes of each dataset")
    class_order: Path | None = Field(None, description="class names in order, or lists of lists")
    train_images: int | None = Field(None, ge=1, description="lessons per class, generated data")
    test_images: int | None = Field(None, ge=2, description="test pictures per class, likewise")
    stream_batch: int = Field(64, ge=1, description="unlabelled images per step")
    stream: bool = Field(True, description="whether there is an unlabelled phase")
    fraction: float = Field(1.0, gt=0, le=1, description="share of D^u that is streamed")
    imbalanced: bool = Field(False, description="draw D^u from a Dirichlet over classes")
    correlated: bool = Field(False, description="stream class by class instead of shuffled")
    one_class: bool = Field(False, description="stream a single class, another in each session")
    chunks: bool = Field(False, description="never stream a picture twice")
    stream_noise: float = Field(0.0, ge=0, description="Gaussian noise on D^u, σ in [0, 1] pixels")
    test_noise: float = Field(0.0, ge=0, description="the same on D^e")
    full_test: bool = Field(False, description="evaluate on the whole test set, stream nothing")

    def learner(self) -> LearnerSettings:
        return LearnerSettings(**{k: getattr(self, k) for k in LearnerSettings.model_fields})


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise InputError(f"settings file '{path}' does not exist") from error
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise InputError(f"settings file '{path}' is not YAML ({error})") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"settings file '{path}' is a {type(values).__name__}; give key: value")
    return values


def named_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The method's own settings in a file."""
    options = values.get("options") or {}
    if not isinstance(options, dict):
        raise InputError(f"options are '{options}'; write them as name: value")
    return options


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """`["sparsity=0.3"]` → `{"sparsity": 0.3}`; values are read as YAML."""
    result = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InputError(
                f"--set got '{pair}'; write it as name=value, for example sparsity=0.3"
            )
        try:
            result[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise InputError(
                f"--set {key} got '{value}', which cannot be read as a value"
            ) from error
    return result


def key_of(facts: Mapping[str, Any]) -> str:
    """The hash under which a result is kept: everything that determines it."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
