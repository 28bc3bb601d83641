"""A teacher that follows the student on the stream: what RMT, CoTTA, PSMT and DSS build on.

Each stream begins with a teacher equal to the student. What may move is what the lessons moved.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dosapp.backbones.base import Backbone, Expert
from dosapp.backbones.wrappers import Ensemble
from dosapp.methods.base import AdaptResult, Method, UnitInterval, method_dataclass
from dosapp.student.student import Student


@method_dataclass
class MeanTeacher(Method):
    phase = "unlabelled"

    momentum: UnitInterval = 0.999  # of the teacher, per step

    def setup(self, student: Student) -> None:
        self.teacher: Backbone = student.shared_copy()
        self.ensemble = Ensemble(student.backbone, self.teacher)

    def begin_stream(self, student: Student) -> None:
        student.set_trainable(student.session_selection)
        student.sync_copy(self.teacher)

    def after_stream_step(self, student: Student) -> None:
        student.ema_update(self.teacher, active=self.momentum, frozen=1.0)

    def student_logits(self, student: Student, pixels: Tensor) -> Tensor:
        """The student's, scaled `[B, C]`; the scale itself must not learn to be sure."""
        return student.backbone.logit_scale.detach() * student.logits(pixels)

    def teacher_logits(self, student: Student, pixels: Tensor) -> Tensor:
        """The teacher's, scaled `[B, C]`."""
        with torch.no_grad():
            return self.teacher.logit_scale * student.logits(pixels, self.teacher)

    def make_result(self, new: Tensor, old: Tensor, loss: Tensor | None) -> AdaptResult:
        """Labels by the two together, and how often they differ."""
        with torch.no_grad():
            labels = (new.softmax(dim=1) + old.softmax(dim=1)).argmax(dim=1)
            differ = (new.argmax(dim=1) != old.argmax(dim=1)).float().mean().item()
        return AdaptResult(labels, loss, differ)

    def shared_copies(self) -> Mapping[str, Backbone]:
        return {"teacher": self.teacher}

    def experts(self, student: Student) -> Mapping[str, Expert]:
        return {"ensemble": self.ensemble, "teacher": self.teacher, "student": student.backbone}
