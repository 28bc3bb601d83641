"""What a method is: hooks around two loops that the learner owns. The default is fine-tuning.

With labels:     choose → begin_session → (begin_epoch → (loss → step → after_step)*)* → end_training
                 → (review's loss → step → after_step)* → end_session
Without labels:  begin_stream → (stream_loss → step → after_stream_step)*

Fields of a method's dataclass are its settings: flags, YAML keys and rows of `dosapp methods`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked
from torch import Tensor

from dosapp.backbones.base import Backbone, Expert
from dosapp.functional.named_tensors import select_prefix
from dosapp.scenario import Session
from dosapp.student.student import Selection, Student

T = TypeVar("T")

# Bounds of methods' settings that pydantic has no name for.
UnitInterval = Annotated[float, Field(ge=0, le=1)]  # from nothing to all
Fraction = Annotated[float, Field(gt=0, le=1)]  # a share that is not nothing
Decay = Annotated[float, Field(ge=0, lt=1)]  # how much of a moving mean stays

# The columns of the paper's comparison of methods that adapt (its Table 1).
Ability = Literal[
    "corrupted data",
    "uncorrupted data",
    "interleaved supervision",
    "reduces forgetting",
    "new classes",
]


@dataclass_transform(field_specifiers=(Field,))
def method_dataclass(kind: type[T]) -> type[T]:
    """A dataclass whose fields are checked when it is made."""
    return cast("type[T]", checked(config=ConfigDict(extra="forbid"))(kind))


@dataclass(frozen=True)
class Batch:
    pixels: Tensor  # [B, 3, H, W] in [0, 1]
    labels: Tensor  # [B], positions in student.classes
    replayed: Tensor  # [B] bool: which rows came from memory


class Batches(Protocol):
    """One pass over a session's batches, read one by one."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class TrainingStage:
    """More steps after the lessons, with a selection and a loss of their own."""

    steps: int
    selection: Selection
    loss: Callable[[Student, Callable[[], Batch], int], Tensor]  # a batch if wanted; step from 0


@dataclass(frozen=True)
class AdaptResult:
    """What an adapter made of a batch without labels."""

    labels: Tensor  # [B], positions in student.classes
    loss: Tensor | None = None  # None: look, but do not learn
    disagreement: float = 0.0  # share of the images it was shown on which the experts differ
    shown: Tensor | None = None  # [B] bool: those a gate let through; None: all


Tensors = dict[str, Tensor]


def flat(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in fields(value):
        inner = getattr(value, item.name)
        if is_dataclass(inner):
            found |= {f"{item.name}.{key}": v for key, v in flat(inner).items()}
        else:
            found[item.name] = inner
    return found


@method_dataclass
class Method:
    """How a student learns with labels and without. Override only what differs."""

    summary: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    phase: ClassVar[Literal["labelled", "unlabelled", "both", "none"]] = "labelled"
    joint: ClassVar[bool] = False  # wants all tasks in one session
    abilities: ClassVar[frozenset[Ability] | None] = None  # as the paper has it; None: not in it
    stores_data: ClassVar[bool] = False  # keeps pictures of its own, besides --memory

    def wrap_backbone(self, net: Backbone, seed: int) -> Backbone:
        """The network with the method's own parameters around it, if it has any."""
        return net

    def reads(self, net: Backbone) -> list[str]:
        """Pictures it looks at besides the stream's, by name: they are part of a result's key."""
        return []

    def setup(self, student: Student) -> None:
        """Once, before the first session. What the method cannot do without is asked for here."""

    # With labels

    def check_session(self, student: Student, session: Session) -> None:
        """Before anything of a session is learned: say what is missing, in one sentence."""

    def select_parameters(self, student: Student, lessons: Batches) -> Selection:
        """Which weights may move in this session; `lessons` is one pass over its batches."""
        return Selection(tuple(student.backbone.tower_weights()))

    def begin_session(self, student: Student, session: Session) -> None:
        """The selection is made, nothing has moved yet."""

    def begin_epoch(self, student: Student, epoch: int, lessons: Batches) -> None:
        """Before each pass over the lessons; `lessons` is one such pass, to look at."""

    def loss(self, student: Student, batch: Batch) -> Tensor:
        return student.clip_loss(batch.pixels, batch.labels)

    def after_step(self, student: Student) -> None: ...

    def end_training(self, student: Student, session: Session) -> None:
        """The lessons are over; reviews follow."""

    def end_session(self, student: Student, session: Session) -> None:
        """Everything of the session has been taught."""

    def extra_stages(self, student: Student, per_epoch: int) -> Sequence[TrainingStage]:
        """Stages after the lessons; `per_epoch` batches are one pass over these."""
        return ()

    # Without labels

    @property
    def adapts(self) -> bool:
        """Whether the unlabelled phase does anything."""
        return type(self).stream_loss is not Method.stream_loss

    def begin_stream(self, student: Student) -> None:
        """After the session: choose what may move in the stream, or inherit the selection."""

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult | None:
        return None

    def after_stream_step(self, student: Student) -> None: ...

    # Answering and saving

    def remove_class(self, index: int) -> None:
        """A class has gone; those after it have moved up. For methods that keep things by class."""

    def shared_copies(self) -> Mapping[str, Backbone]:
        """The other networks the method keeps, by name; they are saved with the learner."""
        return {}

    def experts(self, student: Student) -> Mapping[str, Expert]:
        """Who can be asked; the first one's answer is the learner's."""
        return {"student": student.backbone}

    def state_dict(self) -> Tensors:
        """What the method remembers besides its twins, in every version of the learner."""
        return {}

    def working_state_dict(self) -> Tensors:
        """What only the next step needs, pictures above all: in the checkpoint, in no version."""
        return {}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Both again; scratch may be missing."""

    def hyperparameters(self) -> dict[str, Any]:
        """All settings, flat: `smoothing.gamma`, `learner.sparsity`, …"""
        return flat(self)

    def then(self, adapter: "Method") -> "TwoPhase":
        """Learn with this method, adapt with the other."""
        return TwoPhase(self, adapter)


class TwoPhase(Method):
    """Two methods in turn. The adapter hears of the labelled phase, but does not steer it."""

    phase = "both"

    def __init__(self, labelled: Method, unlabelled: Method) -> None:
        self.labelled, self.unlabelled = labelled, unlabelled
        self.joint = labelled.joint  # type: ignore[misc]
        self.stores_data = labelled.stores_data or unlabelled.stores_data  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"{self.labelled!r}.then({self.unlabelled!r})"

    def hyperparameters(self) -> dict[str, Any]:
        first = {f"labelled.{key}": value for key, value in self.labelled.hyperparameters().items()}
        second = {
            f"unlabelled.{key}": value for key, value in self.unlabelled.hyperparameters().items()
        }
        return first | second

    def wrap_backbone(self, net: Backbone, seed: int) -> Backbone:
        return self.unlabelled.wrap_backbone(self.labelled.wrap_backbone(net, seed), seed)

    def reads(self, net: Backbone) -> list[str]:
        return [*self.labelled.reads(net), *self.unlabelled.reads(net)]

    def setup(self, student: Student) -> None:
        self.labelled.setup(student)
        self.unlabelled.setup(student)

    def check_session(self, student: Student, session: Session) -> None:
        self.labelled.check_session(student, session)
        self.unlabelled.check_session(student, session)

    def select_parameters(self, student: Student, lessons: Batches) -> Selection:
        return self.labelled.select_parameters(student, lessons)

    def begin_session(self, student: Student, session: Session) -> None:
        self.labelled.begin_session(student, session)
        self.unlabelled.begin_session(student, session)

    def begin_epoch(self, student: Student, epoch: int, lessons: Batches) -> None:
        self.labelled.begin_epoch(student, epoch, lessons)
        self.unlabelled.begin_epoch(student, epoch, ())

    def loss(self, student: Student, batch: Batch) -> Tensor:
        return self.labelled.loss(student, batch)

    def after_step(self, student: Student) -> None:
        self.labelled.after_step(student)
        self.unlabelled.after_step(student)

    def end_training(self, student: Student, session: Session) -> None:
        self.labelled.end_training(student, session)
        self.unlabelled.end_training(student, session)

    def end_session(self, student: Student, session: Session) -> None:
        self.labelled.end_session(student, session)
        self.unlabelled.end_session(student, session)

    def extra_stages(self, student: Student, per_epoch: int) -> Sequence[TrainingStage]:
        return (
            *self.labelled.extra_stages(student, per_epoch),
            *self.unlabelled.extra_stages(student, per_epoch),
        )

    @property
    def adapts(self) -> bool:
        return self.unlabelled.adapts

    def begin_stream(self, student: Student) -> None:
        self.unlabelled.begin_stream(student)

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult | None:
        return self.unlabelled.stream_loss(student, pixels)

    def after_stream_step(self, student: Student) -> None:
        self.unlabelled.after_stream_step(student)

    def remove_class(self, index: int) -> None:
        self.labelled.remove_class(index)
        self.unlabelled.remove_class(index)

    def shared_copies(self) -> Mapping[str, Backbone]:
        first = {f"labelled-{name}": net for name, net in self.labelled.shared_copies().items()}
        return {**self.unlabelled.shared_copies(), **first}

    def experts(self, student: Student) -> Mapping[str, Expert]:
        return self.unlabelled.experts(student)

    def state_dict(self) -> Tensors:
        return self._halves(self.labelled.state_dict(), self.unlabelled.state_dict())

    def working_state_dict(self) -> Tensors:
        return self._halves(
            self.labelled.working_state_dict(), self.unlabelled.working_state_dict()
        )

    def _halves(self, first: Tensors, second: Tensors) -> Tensors:
        named = {f"labelled/{name}": t for name, t in first.items()}
        return named | {f"unlabelled/{name}": t for name, t in second.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.labelled.load_state_dict(select_prefix("labelled/", tensors))
        self.unlabelled.load_state_dict(select_prefix("unlabelled/", tensors))
