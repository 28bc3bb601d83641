"""Zero-shot CLIP: the pretrained model, never trained."""

from dosapp.methods.base import Batches, Method, method_dataclass
from dosapp.student.student import Student
from dosapp.student.trainable_weights import Selection


@method_dataclass
class ZeroShot(Method):
    """Train nothing; classes are added by their captions."""

    summary = "the pretrained model, never trained"
    reference = "Radford et al., 2021"
    phase = "none"

    def select_parameters(self, student: Student, batches: Batches) -> Selection:
        return Selection()
