"""A mean teacher on the stream: the base of CoTTA, RMT, PSMT and DSS.

Each stream starts with a teacher equal to the student. The weights that the last session selected
train.
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
    """θ^T ← α θ^T + (1 - α) θ^S after each step of the stream; both experts answer together."""

    phase = "unlabelled"

    momentum: UnitInterval = 0.999  # α

    def setup(self, student: Student) -> None:
        self.teacher: Backbone = student.shared_copy()
        self.ensemble = Ensemble(student.backbone, self.teacher)

    def begin_stream(self, student: Student) -> None:
        student.set_trainable(student.session_selection)
        student.sync_copy(self.teacher)

    def after_stream_step(self, student: Student) -> None:
        student.ema_update(self.teacher, active_momentum=self.momentum, frozen_momentum=1.0)

    def student_logits(self, student: Student, pixels: Tensor) -> Tensor:
        """Scaled logits `[B, C]` of the student, without a gradient for the scale."""
        return student.backbone.logit_scale.detach() * student.score_images(pixels)

    def teacher_logits(self, student: Student, pixels: Tensor) -> Tensor:
        """Scaled logits `[B, C]` of the teacher, without gradients."""
        with torch.no_grad():
            return self.teacher.logit_scale * student.score_images(pixels, self.teacher)

    def make_result(
        self, student_logits: Tensor, teacher_logits: Tensor, loss: Tensor | None
    ) -> AdaptResult:
        """Pseudo-labels by the mean probability of both experts, and their disagreement."""
        with torch.no_grad():
            probabilities = student_logits.softmax(dim=1) + teacher_logits.softmax(dim=1)
            differ = student_logits.argmax(dim=1) != teacher_logits.argmax(dim=1)
        return AdaptResult(probabilities.argmax(dim=1), loss, differ.float().mean().item())

    def shared_copies(self) -> Mapping[str, Backbone]:
        return {"teacher": self.teacher}

    def experts(self, student: Student) -> Mapping[str, Expert]:
        return {"ensemble": self.ensemble, "teacher": self.teacher, "student": student.backbone}
