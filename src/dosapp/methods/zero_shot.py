"""CLIP as it is: the floor of every table."""

from dosapp.methods.base import Batches, Method, method_dataclass
from dosapp.student.selection import Selection
from dosapp.student.student import Student


@method_dataclass
class ZeroShot(Method):
    summary = "the pretrained model, never trained"
    reference = "Radford et al., 2021"
    phase = "none"

    def select_parameters(self, student: Student, lessons: Batches) -> Selection:
        return Selection()
