"""CLIP as it is: the floor of every table."""

from dosapp.methods.base import Lessons, Method, settings
from dosapp.student.student import Selection, Student


@settings
class ZeroShot(Method):
    idea = "the pretrained model, never trained"
    reference = "Radford et al., 2021"
    phase = "none"

    def choose(self, student: Student, lessons: Lessons) -> Selection:
        return Selection()
