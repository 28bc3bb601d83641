"""A labelled method with a further stage after its epochs: alignment or merging of weights."""

from typing import ClassVar, Literal

from dosapp.methods.base import Batches, Method, Phase, method_dataclass
from dosapp.methods.method_pair import Pair
from dosapp.scenario import Session
from dosapp.student.student import Student
from dosapp.student.trainable_weights import Selection


@method_dataclass
class Stage(Method):
    """Alignment or merging, which can follow the epochs of any labelled method.

    It acts in `end_training`, `extra_stages` and `end_session`, and never on the stream.

    Example:
        >>> from dosapp import METHODS, Stage, method_dataclass
        >>> @method_dataclass
        ... class PrintClasses(Stage):
        ...     role = "merging"
        ...     def end_session(self, student, session):
        ...         print(session.classes)
        >>> METHODS["flyp"]().with_stage(PrintClasses())
        FLYP().with_stage(PrintClasses())
    """

    phase: ClassVar[Phase] = "stage"
    role: ClassVar[Literal["alignment", "merging"]]  # prefix of its hyper-parameters and state

    def resume_training(self, student: Student) -> None:
        """Called before the weights of a session are selected."""


class Staged(Pair):
    """A labelled method and a stage; the labelled method adapts and predicts."""

    def __init__(self, labelled: Method, stage: Stage) -> None:
        super().__init__(labelled, stage, stage.role, adapter=labelled)
        trains = labelled.phase != "none"
        self.phase = labelled.phase if trains else "labelled"  # type: ignore[misc]
        self.stage = stage

    def __repr__(self) -> str:
        return f"{self.labelled!r}.with_stage({self.stage!r})"

    def select_parameters(self, student: Student, batches: Batches) -> Selection:
        self.stage.resume_training(student)
        return super().select_parameters(student, batches)

    def end_session(self, student: Student, session: Session) -> None:
        # The stage first: a teacher of the labelled method follows what it did to the weights.
        self.stage.end_session(student, session)
        self.labelled.end_session(student, session)
