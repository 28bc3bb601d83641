"""A teacher that follows the student on the stream: what RMT, CoTTA, PSMT and DSS build on.

Each stream begins with a teacher equal to the student. What may move is what the lessons moved.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dosapp.backbones.base import Backbone, Expert
from dosapp.backbones.wrappers import Ensemble
from dosapp.methods.base import Guess, Method, Share, settings
from dosapp.student.student import Student


@settings
class Taught(Method):
    phase = "unlabelled"

    momentum: Share = 0.999  # of the teacher, per step

    def start(self, student: Student) -> None:
        self.teacher: Backbone = student.twin()
        self.ensemble = Ensemble(student.net, self.teacher)

    def begin_stream(self, student: Student) -> None:
        student.train_only(student.chosen)
        student.catch_up(self.teacher)

    def after_stream_step(self, student: Student) -> None:
        student.ema_update(self.teacher, active=self.momentum, frozen=1.0)

    def logits(self, student: Student, pixels: Tensor) -> Tensor:
        """The student's, scaled `[B, C]`; the scale itself must not learn to be sure."""
        return student.net.scale.detach() * student.logits(pixels)

    def taught(self, student: Student, pixels: Tensor) -> Tensor:
        """The teacher's, scaled `[B, C]`."""
        with torch.no_grad():
            return self.teacher.scale * student.logits(pixels, self.teacher)

    def guess(self, new: Tensor, old: Tensor, loss: Tensor | None) -> Guess:
        """Labels by the two together, and how often they differ."""
        with torch.no_grad():
            labels = (new.softmax(dim=1) + old.softmax(dim=1)).argmax(dim=1)
            differ = (new.argmax(dim=1) != old.argmax(dim=1)).float().mean().item()
        return Guess(labels, loss, differ)

    def twins(self) -> Mapping[str, Backbone]:
        return {"teacher": self.teacher}

    def experts(self, student: Student) -> Mapping[str, Expert]:
        return {"ensemble": self.ensemble, "teacher": self.teacher, "student": student.net}
