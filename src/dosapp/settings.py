"""Settings of a learner and of a run: pydantic models, YAML files and `name=value` options.

One description serves the command line, YAML files, `learner.json`, `result.json` and the key under
which a result is stored. Flags win over files; unknown keys are errors. This module imports no
torch, so that `dosapp --help` is quick.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from dosapp.errors import InputError, unknown_name

PAPER_LR, PAPER_EPOCHS, PAPER_BATCH_SIZE = 7.5e-6, 10, 64


class Settings(BaseModel):
    """Base of all settings: immutable, no unknown keys, other names as aliases.

    A wrong name or value raises an `InputError` of one sentence, also from the constructor.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    aliases: ClassVar[Mapping[str, str]] = {}  # other names that are accepted → the name

    def __init__(self, **values: Any) -> None:
        """Validate values and turn the first problem into one sentence."""
        self._check_names(values, "setting")
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            reason = first["msg"].removeprefix("Value error, ")
            if not name:
                raise InputError(reason) from error
            reason = f"{reason[0].lower()}{reason[1:]}"
            raise InputError(f"{name} is {first['input']!r}: {reason}") from error

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str = "settings") -> Self:
        """Make settings from values of a file or the command line.

        Args:
            values: Setting names and their values; names of version 0.1 are accepted.
            source: Where the values come from, for the message.

        Returns:
            The validated settings.

        Raises:
            InputError: A name is unknown or a value is not allowed.

        Example:
            >>> RunSettings.parse({"method": "spu", "batch": 32}).batch_size
            32
        """
        cls._check_names(values, f"key in {source}")
        return cls(**values)

    @classmethod
    def _check_names(cls, values: Mapping[str, Any], kind: str) -> None:
        for key in values:
            if key not in cls.model_fields and key not in cls.aliases:
                raise unknown_name(kind, str(key), cls.model_fields)

    @classmethod
    def rename_aliases(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Replace other accepted names by the names of the settings."""
        renamed: dict[str, Any] = {}
        for key, value in values.items():
            name = cls.aliases.get(key, key)
            if name in renamed:
                raise InputError(f"{name} is given twice, also under another name; give it once")
            renamed[name] = value
        return renamed

    @model_validator(mode="before")
    @classmethod
    def _accept_aliases(cls, values: Any) -> Any:
        return cls.rename_aliases(values) if isinstance(values, Mapping) else values


HeadKind = Literal["ncm", "gda", "ncm-moved", "gda-moved", "ranpac"]


class LearnerSettings(Settings):
    """Everything that decides how a learner trains.

    Example:
        >>> LearnerSettings(method="spu", epochs=5).method
        'spu'
    """

    aliases = {
        "memory": "buffer_size",
        "batch": "batch_size",
        "caption": "template",
        "rivals": "all_class_negatives",
        "gate": "confidence_gate",
        "temper": "entropy_lr_scaling",
        "skew_aware": "skew_aware_ema",
        "readmit": "mask_reactivation",
        "readmit_every": "reactivation_interval",
        "checkpointing": "gradient_checkpointing",
        # of open_clip and transformers
        "wd": "weight_decay",
        "learning_rate": "lr",
        "num_train_epochs": "epochs",
        "per_device_train_batch_size": "batch_size",
    }

    backbone: str = Field("tiny", description="tiny, ViT-B-16, a hub id, or a local folder")
    method: str = Field(
        "stream-gda-ensemble", description="method of the labelled phase: dosapp methods"
    )
    adapt: str | None = Field(None, description="method of the unlabelled phase, if another")
    options: dict[str, Any] = Field(default_factory=dict, description="hyper-parameters")
    template: str = Field("", description="caption of a class, {} is its name [the dataset's]")
    buffer_size: int = Field(0, ge=0, description="images in the replay buffer; 0 stores none")
    seed: int = Field(0, ge=0, description="order of images, test-set halves, replay buffer")
    lr: float | None = Field(
        None, gt=0, description="learning rate [stored for tiny; chosen on your data]"
    )
    auto_lr: bool = Field(
        False, description="choose lr on the first session, also where there is a default"
    )
    weight_decay: float = Field(
        0.2,
        ge=0,
        description="of AdamW, on trainable weights of the backbone, not on prompts or adapters",
    )
    epochs: int | None = Field(
        None, ge=1, description="passes over the images of a session [10; few images of yours: 30]"
    )
    batch_size: int | None = Field(
        None, ge=1, description="labelled images per step [64; few images of yours: 8 to 32]"
    )
    all_class_negatives: bool = Field(
        False, description="captions of all other classes as negatives [sessions of one class only]"
    )

    align: bool = Field(False, description="align the projections on class statistics, as SLCA")
    merging: Literal["magmax", "cofima"] | None = Field(
        None, description="merge the weights of sessions [no merging]"
    )

    stream_lr: float | None = Field(None, gt=0, description="learning rate on the stream [lr]")
    confidence_gate: float = Field(
        0.0, ge=0, lt=1, description="probability below which a stream image is skipped"
    )
    entropy_lr_scaling: bool = Field(
        False, description="scale the stream's learning rate by the batch's certainty"
    )
    skew_aware_ema: bool = Field(
        False, description="slow the teacher down on a class-skewed stream"
    )
    mask_reactivation: float = Field(
        0.0, ge=0, lt=1, description="share of the mask given to entries of past sessions"
    )
    reactivation_interval: int = Field(
        10, ge=1, description="stream steps between two choices of these entries"
    )

    head: HeadKind | None = Field(
        None,
        description="predict by class statistics, stored or moved by the stream [the method's]",
    )
    head_text_weight: float = Field(
        0.0, ge=0, description="weight of the captions' logits beside the head that is given"
    )
    head_session_drift: bool | None = Field(
        None, description="move a moved head by images of each new session, too [if it is moved]"
    )
    head_ensemble: bool = Field(
        False,
        description="add the scores of gda on the pretrained model's features to a gda head's, "
        "if the method does not",
    )
    head_width: int = Field(2000, ge=1, description="random features of a ranpac head")

    device: str = Field("cpu", description="cpu, cuda, mps, or auto")
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="of matrix products (autocast); weights and losses stay float32"
    )
    compile: bool = Field(False, description="compile the transformer blocks with torch.compile")
    microbatch: int = Field(0, ge=0, description="images encoded at a time; 0: the whole batch")
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass"
    )

    @model_validator(mode="after")
    def _check_lr(self) -> Self:
        if self.auto_lr and self.lr is not None:
            raise ValueError(
                f"lr is {self.lr:g} and auto_lr would choose another; give one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_head(self) -> Self:
        if self.head_text_weight and self.head not in ("gda", "gda-moved", "ranpac"):
            raise ValueError(
                f"head_text_weight goes with head gda, gda-moved or ranpac, not {self.head}"
            )
        return self

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages after the epochs of a session, in their order."""
        return list_stages(self.merging, self.align)

    @field_validator("template")
    @classmethod
    def _check_placeholder(cls, template: str) -> str:
        if template and (template.count("{}") != 1 or template.count("{") != 1):
            raise ValueError("write {} once, where the class name goes: 'a photo of a {}.'")
        return template


def list_stages(merging: str | None, align: bool) -> tuple[str, ...]:
    """Merging comes first: the alignment makes up for what it did to the projections.

    Example:
        >>> list_stages("magmax", True)
        ('magmax', 'alignment')
    """
    return (*((merging,) if merging else ()), *(("alignment",) if align else ()))


class RunSettings(LearnerSettings):
    """An experiment: a learner and the scenario it is trained and evaluated on.

    Example:
        >>> RunSettings(method="spu", data="shapes", tasks=5).learner().method
        'spu'
    """

    aliases = {
        **LearnerSettings.aliases,
        "stream_batch": "stream_batch_size",
        "fraction": "stream_fraction",
        "chunks": "disjoint_stream",
    }

    # Other defaults than a learner's: experiments are about the paper's method, and about each part
    # of another one alone. A learner in use gets what is best if no stream comes, too.
    method: str = Field("dosapp", description="method of the labelled phase: dosapp methods")
    head_session_drift: bool = Field(
        False, description="move a moved head by images of each new session, too"
    )
    data: str = Field("shapes", description="dosapp datasets; a+b for one after the other")
    data_dir: Path | None = Field(None, description="a local copy of the paper's datasets")
    skip_bad_images: bool = Field(False, description="skip unreadable images, and count them")
    tasks: int = Field(10, ge=1, description="tasks in each dataset")
    classes: int | None = Field(None, ge=1, description="use only so many classes of each dataset")
    class_order: Path | None = Field(
        None, description="file of class names in order, or lists of lists; paper: SPU's order"
    )
    class_order_seed: int | None = Field(
        None, ge=0, lt=2**32, description="shuffle the classes as PyCIL does; usually 1993"
    )
    task_column: str | None = Field(
        None, description="column of a CSV, such as date: classes that begin together are a task"
    )
    train_images: int | None = Field(
        None, ge=1, description="training images per class, generated data only"
    )
    test_images: int | None = Field(
        None, ge=2, description="test images per class, generated data only"
    )
    stream_batch_size: int | None = Field(
        None, ge=1, description="unlabelled images per step [64; few images of yours: 8 to 32]"
    )
    stream: bool = Field(True, description="whether there is an unlabelled phase")
    stream_fraction: float = Field(1.0, gt=0, le=1, description="share of D^u that is streamed")
    imbalanced: bool = Field(False, description="draw D^u from a Dirichlet over classes")
    correlated: bool = Field(False, description="stream class by class instead of shuffled")
    one_class: bool = Field(False, description="stream a single class, another in each session")
    classes_per_batch: str | None = Field(
        None,
        pattern=r"^[1-9][0-9]*(-[1-9][0-9]*)?$",
        description="stream batches of few classes, for example 1-4",
    )
    stream_dirichlet: float | None = Field(
        None, gt=0, description="stream in slots with Dirichlet shares of classes, for example 0.1"
    )
    first_stream: bool = Field(True, description="whether the first session has a stream")
    disjoint_stream: bool = Field(False, description="never stream an image twice")
    stream_noise: float = Field(0.0, ge=0, description="Gaussian noise on D^u, σ in [0, 1] pixels")
    test_noise: float = Field(0.0, ge=0, description="the same on D^e")
    full_test: bool = Field(False, description="evaluate on the whole test set, without a stream")

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        orders = ("correlated", "one_class", "classes_per_batch", "stream_dirichlet")
        chosen = [name for name in orders if getattr(self, name)]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} are two orders of one stream; give one")
        if self.class_order is not None and self.class_order_seed is not None:
            raise ValueError(
                f"class_order '{self.class_order}' and class_order_seed {self.class_order_seed} "
                "are two orders of the classes; give one"
            )
        if self.task_column is not None and (self.class_order or self.class_order_seed is not None):
            raise ValueError(
                f"task_column '{self.task_column}' orders the classes; leave out class_order"
            )
        return self

    def learner(self) -> LearnerSettings:
        """The part of the settings that a learner needs."""
        return LearnerSettings(**{k: getattr(self, k) for k in LearnerSettings.model_fields})


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of `key: value` pairs."""
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


def read_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The method's hyper-parameters in the values of a settings file."""
    options = values.get("options") or {}
    if not isinstance(options, dict):
        raise InputError(f"options are '{options}'; write them as name: value")
    return options


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """Parse `name=value` pairs; values are read as YAML.

    Example:
        >>> parse_options(["sparsity=0.3"])
        {'sparsity': 0.3}
    """
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InputError(
                f"--set got '{pair}'; write it as name=value, for example sparsity=0.3"
            )
        try:
            options[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise InputError(
                f"--set {key} got '{value}', which cannot be read as a value"
            ) from error
    return options


def hash_key(facts: Mapping[str, Any]) -> str:
    """Hash everything that determines a result; the result is stored under this key."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
