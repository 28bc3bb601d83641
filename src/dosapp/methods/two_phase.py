"""Two methods as one: the first trains with labels, the second adapts to the stream."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dosapp.backbones.base import Backbone, Expert
from dosapp.data.preprocess import Preprocess
from dosapp.functional.named_tensors import select_prefix
from dosapp.methods.base import AdaptResult, Batch, Batches, Method, Tensors, TrainingStage
from dosapp.scenario import Session
from dosapp.student.selection import Selection
from dosapp.student.student import Student


class TwoPhase(Method):
    """A labelled and an unlabelled method.

    The unlabelled method is told about the labelled phase (its teacher follows, its prototypes are
    collected), but it neither selects the weights nor sees the loss there.
    """

    phase = "both"

    def __init__(self, labelled: Method, unlabelled: Method) -> None:
        self.labelled, self.unlabelled = labelled, unlabelled
        self.joint = labelled.joint  # type: ignore[misc]
        self.stores_data = labelled.stores_data or unlabelled.stores_data  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"{self.labelled!r}.then({self.unlabelled!r})"

    def hyperparameters(self) -> dict[str, Any]:
        return _join_halves(self.labelled.hyperparameters(), self.unlabelled.hyperparameters(), ".")

    def key_hyperparameters(self) -> dict[str, Any]:
        halves = self.labelled.key_hyperparameters(), self.unlabelled.key_hyperparameters()
        return _join_halves(*halves, ".")

    def wrap_backbone(self, backbone: Backbone, seed: int) -> Backbone:
        return self.unlabelled.wrap_backbone(self.labelled.wrap_backbone(backbone, seed), seed)

    def external_images(self, preprocess: Preprocess) -> list[str]:
        labelled = self.labelled.external_images(preprocess)
        return [*labelled, *self.unlabelled.external_images(preprocess)]

    def setup(self, student: Student) -> None:
        self.labelled.setup(student)
        self.unlabelled.setup(student)

    # Labelled phase

    def check_session(self, student: Student, session: Session) -> None:
        self.labelled.check_session(student, session)
        self.unlabelled.check_session(student, session)

    def select_parameters(self, student: Student, batches: Batches) -> Selection:
        return self.labelled.select_parameters(student, batches)

    def begin_session(self, student: Student, session: Session) -> None:
        self.labelled.begin_session(student, session)
        self.unlabelled.begin_session(student, session)

    def begin_epoch(self, student: Student, epoch: int, batches: Batches) -> None:
        self.labelled.begin_epoch(student, epoch, batches)
        self.unlabelled.begin_epoch(student, epoch, ())

    def loss(self, student: Student, batch: Batch) -> Tensor:
        return self.labelled.loss(student, batch)

    def after_step(self, student: Student) -> None:
        self.labelled.after_step(student)
        self.unlabelled.after_step(student)

    def end_training(self, student: Student, session: Session) -> None:
        self.labelled.end_training(student, session)
        self.unlabelled.end_training(student, session)

    def extra_stages(self, student: Student, steps_per_epoch: int) -> Sequence[TrainingStage]:
        return (
            *self.labelled.extra_stages(student, steps_per_epoch),
            *self.unlabelled.extra_stages(student, steps_per_epoch),
        )

    def end_session(self, student: Student, session: Session) -> None:
        self.labelled.end_session(student, session)
        self.unlabelled.end_session(student, session)

    # Unlabelled phase

    @property
    def adapts(self) -> bool:
        return self.unlabelled.adapts

    def begin_stream(self, student: Student) -> None:
        self.unlabelled.begin_stream(student)

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult | None:
        return self.unlabelled.stream_loss(student, pixels)

    def after_stream_step(self, student: Student) -> None:
        self.unlabelled.after_stream_step(student)

    # Prediction and state

    def experts(self, student: Student) -> Mapping[str, Expert]:
        return self.unlabelled.experts(student)

    def remove_class(self, index: int) -> None:
        self.labelled.remove_class(index)
        self.unlabelled.remove_class(index)

    def shared_copies(self) -> Mapping[str, Backbone]:
        labelled = {f"labelled-{name}": net for name, net in self.labelled.shared_copies().items()}
        return {**self.unlabelled.shared_copies(), **labelled}

    def state_dict(self) -> Tensors:
        return _join_halves(self.labelled.state_dict(), self.unlabelled.state_dict(), "/")

    def working_state_dict(self) -> Tensors:
        halves = self.labelled.working_state_dict(), self.unlabelled.working_state_dict()
        return _join_halves(*halves, "/")

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.labelled.load_state_dict(select_prefix("labelled/", tensors))
        self.unlabelled.load_state_dict(select_prefix("unlabelled/", tensors))


def _join_halves(
    labelled: Mapping[str, Any], unlabelled: Mapping[str, Any], separator: str
) -> dict[str, Any]:
    """Both as one mapping, under the names of their halves."""
    first = {f"labelled{separator}{name}": value for name, value in labelled.items()}
    return first | {f"unlabelled{separator}{name}": v for name, v in unlabelled.items()}
