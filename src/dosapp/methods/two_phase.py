"""Two methods as one: the first trains with labels, the second adapts to the stream."""

from collections.abc import Mapping

from torch import Tensor

from dosapp.backbones.base import Backbone, Expert
from dosapp.methods.base import AdaptResult, Method
from dosapp.methods.pair import Pair
from dosapp.student.student import Student


class TwoPhase(Pair):
    """A labelled and an unlabelled method.

    The unlabelled method is told about the labelled phase (its teacher follows, its prototypes are
    collected), but it neither selects the weights nor sees the loss there.
    """

    phase = "both"

    def __init__(self, labelled: Method, unlabelled: Method) -> None:
        super().__init__(labelled, unlabelled, "unlabelled")
        self.unlabelled = unlabelled
        self.head = unlabelled.head  # type: ignore[misc]
        self.head_text_weight = unlabelled.head_text_weight  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"{self.labelled!r}.then({self.unlabelled!r})"

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

    # Prediction and copies

    def experts(self, student: Student) -> Mapping[str, Expert]:
        return self.unlabelled.experts(student)

    def shared_copies(self) -> Mapping[str, Backbone]:
        labelled = {f"labelled-{name}": net for name, net in self.labelled.shared_copies().items()}
        return {**self.unlabelled.shared_copies(), **labelled}
