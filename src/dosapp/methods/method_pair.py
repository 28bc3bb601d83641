"""Two methods as one: which hooks call both, and which only one of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dosapp.backbones.base import Backbone, Expert
from dosapp.data.preprocess import Preprocess
from dosapp.functional.named_tensors import select_prefix
from dosapp.methods.base import AdaptResult, Batch, Batches, Method, Tensors, TrainingStage
from dosapp.scenario import Session
from dosapp.student.student import Student
from dosapp.student.trainable_weights import Selection


class Pair(Method):
    """A labelled method, which selects the weights and has the loss, and a companion.

    Hooks of the labelled phase call both, the labelled method first. One of them adapts and
    predicts.

    Args:
        labelled: The method of the labelled phase.
        companion: The other half.
        role: Prefix of the companion's hyper-parameters and state.
        adapter: The half that adapts and predicts.
    """

    def __init__(self, labelled: Method, companion: Method, role: str, adapter: Method) -> None:
        self.labelled, self.companion, self.role = labelled, companion, role
        self.adapter = adapter
        self.head = adapter.head  # type: ignore[misc]
        self.head_text_weight = adapter.head_text_weight  # type: ignore[misc]
        self.head_ensemble = adapter.head_ensemble  # type: ignore[misc]
        self.disagreement_is_harm = adapter.disagreement_is_harm  # type: ignore[misc]
        self.joint = labelled.joint  # type: ignore[misc]
        self.stores_data = labelled.stores_data or companion.stores_data  # type: ignore[misc]

    def hyperparameters(self) -> dict[str, Any]:
        return self._join(self.labelled.hyperparameters(), self.companion.hyperparameters(), ".")

    def key_hyperparameters(self) -> dict[str, Any]:
        halves = self.labelled.key_hyperparameters(), self.companion.key_hyperparameters()
        return self._join(*halves, ".")

    def wrap_backbone(self, backbone: Backbone, seed: int) -> Backbone:
        return self.companion.wrap_backbone(self.labelled.wrap_backbone(backbone, seed), seed)

    def external_images(self, preprocess: Preprocess) -> list[str]:
        labelled = self.labelled.external_images(preprocess)
        return [*labelled, *self.companion.external_images(preprocess)]

    def setup(self, student: Student) -> None:
        self.labelled.setup(student)
        self.companion.setup(student)

    # Labelled phase

    def check_session(self, student: Student, session: Session) -> None:
        self.labelled.check_session(student, session)
        self.companion.check_session(student, session)

    def select_parameters(self, student: Student, batches: Batches) -> Selection:
        return self.labelled.select_parameters(student, batches)

    def begin_session(self, student: Student, session: Session) -> None:
        self.labelled.begin_session(student, session)
        self.companion.begin_session(student, session)

    def begin_epoch(self, student: Student, epoch: int, batches: Batches) -> None:
        self.labelled.begin_epoch(student, epoch, batches)
        self.companion.begin_epoch(student, epoch, ())

    def loss(self, student: Student, batch: Batch) -> Tensor:
        return self.labelled.loss(student, batch)

    def after_step(self, student: Student) -> None:
        self.labelled.after_step(student)
        self.companion.after_step(student)

    def end_training(self, student: Student, session: Session) -> None:
        self.labelled.end_training(student, session)
        self.companion.end_training(student, session)

    def extra_stages(self, student: Student, steps_per_epoch: int) -> Sequence[TrainingStage]:
        return (
            *self.labelled.extra_stages(student, steps_per_epoch),
            *self.companion.extra_stages(student, steps_per_epoch),
        )

    def end_session(self, student: Student, session: Session) -> None:
        self.labelled.end_session(student, session)
        self.companion.end_session(student, session)

    # Unlabelled phase

    @property
    def adapts(self) -> bool:
        return self.adapter.adapts

    def begin_stream(self, student: Student) -> None:
        self.adapter.begin_stream(student)

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult | None:
        return self.adapter.stream_loss(student, pixels)

    def after_stream_step(self, student: Student) -> None:
        self.adapter.after_stream_step(student)

    # Prediction and state

    def experts(self, student: Student) -> Mapping[str, Expert]:
        return self.adapter.experts(student)

    def shared_copies(self) -> Mapping[str, Backbone]:
        """Those of the adapter under their own names."""
        names = {"labelled": self.labelled, self.role: self.companion}
        others = {
            f"{half}-{name}": net
            for half, method in names.items()
            if method is not self.adapter
            for name, net in method.shared_copies().items()
        }
        return {**self.adapter.shared_copies(), **others}

    def remove_class(self, index: int) -> None:
        self.labelled.remove_class(index)
        self.companion.remove_class(index)

    def state_dict(self) -> Tensors:
        return self._join(self.labelled.state_dict(), self.companion.state_dict(), "/")

    def working_state_dict(self) -> Tensors:
        halves = self.labelled.working_state_dict(), self.companion.working_state_dict()
        return self._join(*halves, "/")

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.labelled.load_state_dict(select_prefix("labelled/", tensors))
        self.companion.load_state_dict(select_prefix(f"{self.role}/", tensors))

    def _join(
        self, labelled: Mapping[str, Any], companion: Mapping[str, Any], separator: str
    ) -> dict[str, Any]:
        """Both as one mapping, under the names of their halves."""
        first = {f"labelled{separator}{name}": value for name, value in labelled.items()}
        return first | {f"{self.role}{separator}{name}": v for name, v in companion.items()}
