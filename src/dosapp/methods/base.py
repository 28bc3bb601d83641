"""The interface of a method: hooks around the two training loops, which the learner owns.

Labelled phase:    check_session → select_parameters → begin_session
                   → (begin_epoch → (loss → step → after_step)*)* → end_training
                   → (loss of an extra stage → step → after_step)* → end_session
Unlabelled phase:  begin_stream → (stream_loss → step → after_stream_step)*

A method never changes a weight itself: it selects parameters and returns losses, and the `Student`
takes the steps; averages and restored values go through `Student.assign`. Every default does
nothing, except that `loss` is CLIP's and all weights train. The fields of a method's dataclass are
its hyper-parameters: flags, YAML keys and `dosapp methods`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Protocol,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
)

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from dosapp.backbones.base import Backbone, Expert
from dosapp.data.preprocess import Preprocess
from dosapp.errors import InputError
from dosapp.scenario import Session
from dosapp.settings import HeadKind
from dosapp.student.student import Student
from dosapp.student.trainable_weights import Selection

if TYPE_CHECKING:
    from dosapp.methods.staged import Stage, Staged
    from dosapp.methods.two_phase import TwoPhase

T = TypeVar("T")

# Bounds of hyper-parameters that pydantic has no name for.
UnitInterval = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of an exponential moving average

Phase = Literal["labelled", "unlabelled", "both", "none", "stage"]

# The columns of the paper's comparison of test-time methods (its Table 1).
Ability = Literal[
    "corrupted data",
    "uncorrupted data",
    "interleaved supervision",
    "reduces forgetting",
    "new classes",
]


@dataclass_transform(field_specifiers=(Field,))
def method_dataclass(cls: type[T]) -> type[T]:
    """Make a dataclass whose fields are validated when it is constructed.

    Args:
        cls: A subclass of `Method`; its annotated fields are the hyper-parameters.

    Returns:
        The same class, as a dataclass.

    Example:
        >>> from dosapp import Method, method_dataclass
        >>> @method_dataclass
        ... class Scaled(Method):
        ...     factor: float = 2.0
        >>> Scaled(factor="0.5").hyperparameters()
        {'factor': 0.5}
    """
    return cast("type[T]", pydantic_dataclass(config=ConfigDict(extra="forbid"))(cls))


@dataclass(frozen=True)
class Batch:
    """Labelled images of one training step."""

    pixels: Tensor  # float [B, 3, H, W] in [0, 1]
    labels: Tensor  # [B], indices of the student's classes
    replayed: Tensor  # [B] bool: rows that came from the replay buffer


class Batches(Protocol):
    """One pass over the labelled batches of a session; each is read when its turn comes."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class TrainingStage:
    """More steps after the epochs of a session, with a selection and a loss of their own.

    The loss gets the student, a function that reads the step's batch, and the step from 0.
    """

    steps: int
    selection: Selection
    loss: Callable[[Student, Callable[[], Batch], int], Tensor]


@dataclass(frozen=True)
class AdaptResult:
    """What one batch of the stream gave.

    A method fills in `labels`, `loss`, `disagreement` and `features`; the learner adds the rest.

    Example:
        >>> import torch
        >>> AdaptResult(torch.tensor([0, 2]), trusted=torch.tensor([True, False])).gated
        1
    """

    labels: Tensor  # [B] pseudo-labels, indices of the student's classes
    loss: Tensor | None = None  # None: nothing to learn from this batch
    disagreement: float = 0.0  # share of the images on which the experts disagree
    features: Tensor | None = None  # [B, D] by the method's expert, if the loss needed them
    trusted: Tensor | None = None  # [B] bool: images that passed the confidence gate; None: all
    stepped: bool = False  # whether the weights or a head's statistics changed

    @property
    def gated(self) -> int:
        """Number of images that the confidence gate held back."""
        return 0 if self.trusted is None else int((~self.trusted).sum())


Tensors = dict[str, Tensor]


@method_dataclass
class Method:
    """How a student learns with labels and without. Override only what differs.

    Example:
        >>> from dosapp import METHODS
        >>> METHODS["spu"](sparsity=0.2).hyperparameters()["sparsity"]
        0.2
    """

    summary: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    phase: ClassVar[Phase] = "labelled"
    joint: ClassVar[bool] = False  # trains on all tasks in one session
    abilities: ClassVar[frozenset[Ability] | None] = None  # the paper's Table 1; None: not in it
    stores_data: ClassVar[bool] = False  # stores images itself, besides the replay buffer
    head: ClassVar[HeadKind | None] = None  # what predicts by default; None: captions
    head_text_weight: ClassVar[float] = 0.0  # of the captions' logits beside that head's
    head_ensemble: ClassVar[bool] = False  # add a head of the frozen model's features to it
    # Whether a stream on which the experts disagree more than usual is likely to do harm.
    disagreement_is_harm: ClassVar[bool] = True

    # Hyper-parameters by the names and values of version 0.1, today's name → the old one. Old names
    # are accepted everywhere, and keys of results are computed from them.
    old_names: ClassVar[Mapping[str, str]] = {}
    old_values: ClassVar[Mapping[str, Mapping[str, str]]] = {}

    def wrap_backbone(self, backbone: Backbone, seed: int) -> Backbone:
        """Put the method's own parameters around the backbone, if it has any.

        Args:
            backbone: The pretrained model.
            seed: For the initial values of the parameters.

        Returns:
            A `BackboneWrapper`, or the backbone itself.
        """
        return backbone

    def external_images(self, preprocess: Preprocess) -> list[str]:
        """Names of the images it reads besides the scenario's; part of a result's key."""
        return []

    def setup(self, student: Student) -> None:
        """Called once, before the first session: create shared copies and empty state."""

    # Labelled phase

    def check_session(self, student: Student, session: Session) -> None:
        """Called before anything of a session is learned; raise if something is missing.

        Args:
            student: The model that trains.
            session: The session.
        """

    def select_parameters(self, student: Student, batches: Batches) -> Selection:
        """Select the weights that train in this session.

        Args:
            student: Before the first step of the session.
            batches: One pass over the session's images.

        Returns:
            Names of weights, with a mask if only some entries train.
        """
        return Selection(tuple(student.backbone.own_weights()))

    def begin_session(self, student: Student, session: Session) -> None:
        """Called when the selection is made and no weight has changed yet.

        Args:
            student: The model that trains.
            session: The session.
        """

    def begin_epoch(self, student: Student, epoch: int, batches: Batches) -> None:
        """Called before each epoch.

        Args:
            student: The student.
            epoch: From 0.
            batches: One pass over the session's images.
        """

    def loss(self, student: Student, batch: Batch) -> Tensor:
        """The loss of a labelled batch.

        Args:
            student: The student.
            batch: Images and labels, with replayed ones if there is a buffer.

        Returns:
            A scalar with a gradient.
        """
        return student.clip_loss(batch.pixels, batch.labels)

    def after_step(self, student: Student) -> None:
        """Called after each labelled step that changed the weights."""

    def end_training(self, student: Student, session: Session) -> None:
        """Called after the last epoch, before the extra stages.

        Args:
            student: The model that trains.
            session: The session.
        """

    def extra_stages(self, student: Student, steps_per_epoch: int) -> Sequence[TrainingStage]:
        """Stages of training after the epochs.

        Args:
            student: Before the first step of the session.
            steps_per_epoch: Of the session.

        Returns:
            The stages, in order.
        """
        return ()

    def end_session(self, student: Student, session: Session) -> None:
        """Called when everything of the session has been learned.

        Args:
            student: The model that trains.
            session: The session.
        """

    # Unlabelled phase

    @property
    def adapts(self) -> bool:
        """Whether the unlabelled phase does anything."""
        return type(self).stream_loss is not Method.stream_loss

    def begin_stream(self, student: Student) -> None:
        """Called after a session: select the weights that train on the stream."""

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult | None:
        """Pseudo-labels and loss of an unlabelled batch.

        Args:
            student: The student.
            pixels: Images `[B, 3, H, W]`, floats in [0, 1].

        Returns:
            Labels, and a loss if a step is to be taken; None if the method does not adapt.
        """
        return None

    def after_stream_step(self, student: Student) -> None:
        """Called after each step on the stream that changed the weights."""

    # Prediction and state

    def experts(self, student: Student) -> Mapping[str, Expert]:
        """The models that can predict, by name; the first one answers for the learner."""
        return {"student": student.backbone}

    def remove_class(self, index: int) -> None:
        """Drop what is kept for a class; the indices of the classes after it decrease by one."""

    def shared_copies(self) -> Mapping[str, Backbone]:
        """Copies of the backbone that the method keeps, by name; saved with the learner."""
        return {}

    def state_dict(self) -> Tensors:
        """Further tensors that are saved in every version of the learner."""
        return {}

    def working_state_dict(self) -> Tensors:
        """Tensors that only the next step needs, such as images: in checkpoints, in no version."""
        return {}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore `state_dict` and, if they are there, the tensors of `working_state_dict`."""

    # Hyper-parameters

    def hyperparameters(self) -> dict[str, Any]:
        """All hyper-parameters, nested names joined by dots: `ema.gamma`, `selection.sparsity`."""
        return flatten_fields(self)

    def key_hyperparameters(self) -> dict[str, Any]:
        """The same as version 0.1 spelled them, for the keys of results."""
        return flatten_fields(self, old=True)

    def then(self, adapter: "Method") -> "TwoPhase":
        """Combine: learn with this method, adapt with the other.

        Example:
            >>> from dosapp import METHODS
            >>> METHODS["spu"]().then(METHODS["self-training"]()).phase
            'both'
        """
        from dosapp.methods.two_phase import TwoPhase

        return TwoPhase(self, adapter)

    def with_stage(self, stage: "Stage") -> "Staged":
        """Combine: learn with this method, then align or merge in each session.

        Example:
            >>> from dosapp import METHODS
            >>> from dosapp.methods.alignment import ClassifierAlignment
            >>> METHODS["spu"]().with_stage(ClassifierAlignment(ca_epochs=2)).phase
            'labelled'
        """
        from dosapp.methods.staged import Staged

        return Staged(self, stage)


def check_declaration(method: object) -> None:
    """Raise an `InputError` if something is no method, or a method is declared wrongly."""
    if not isinstance(method, type) or not issubclass(method, Method):
        raise InputError(f"{method!r} is no method; give a subclass of Method")
    if method.phase not in get_args(Phase):
        known = ", ".join(f"'{phase}'" for phase in get_args(Phase))
        raise InputError(f"the phase of {method.__name__} is '{method.phase}'; give one of {known}")
    annotations = inspect.get_annotations(method).items()
    own = [n for n, kind in annotations if not n.startswith("_") and "ClassVar" not in str(kind)]
    if own and "__pydantic_fields__" not in vars(method):
        raise InputError(
            f"{method.__name__} lacks @method_dataclass, so '{own[0]}' is no hyper-parameter"
        )


def flatten_fields(value: Any, old: bool = False) -> dict[str, Any]:
    """The fields of a (nested) dataclass; with `old`, by their names and values in version 0.1."""
    flat: dict[str, Any] = {}
    names: Mapping[str, str] = getattr(value, "old_names", {}) if old else {}
    values: Mapping[str, Mapping[str, str]] = getattr(value, "old_values", {}) if old else {}
    for item in fields(value):
        name, inner = names.get(item.name, item.name), getattr(value, item.name)
        if is_dataclass(inner):
            flat |= {f"{name}.{key}": v for key, v in flatten_fields(inner, old).items()}
        else:
            flat[name] = values.get(item.name, {}).get(inner, inner) if old else inner
    return flat
