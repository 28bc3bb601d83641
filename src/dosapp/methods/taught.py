"""A teacher that follows the student on the stream, and adapters that learn from one: dss-style.

Each stream begins with a teacher equal to the student. What may move is what the lessons moved.
"""

from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from dosapp.backbones.added import Ensemble
from dosapp.backbones.base import Backbone, Expert
from dosapp.core.losses import complementary, cross_entropy_to
from dosapp.methods.base import Guess, Method, Tensors, settings
from dosapp.student import Student

Momentum = Annotated[float, Field(ge=0, le=1)]


@settings
class Taught(Method):
    """What RMT, CoTTA, PSMT and the reading of DSS have in common."""

    phase = "unlabelled"

    momentum: Momentum = 0.999  # of the teacher, per step

    def start(self, student: Student) -> None:
        self.teacher: Backbone = student.twin()
        self.ensemble = Ensemble(student.net, self.teacher)

    def begin_stream(self, student: Student) -> None:
        student.train_only(student.chosen)
        student.catch_up(self.teacher)

    def after_stream_step(self, student: Student) -> None:
        student.smooth(self.teacher, active=self.momentum, frozen=1.0)

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


@settings
class DSS(Taught):
    idea = "learn what sure images are and what unsure ones are not"
    reference = "after the abstract of Wang et al., 2024"
    abilities = frozenset({"corrupted data"})

    memory: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of the moving threshold

    def start(self, student: Student) -> None:
        super().start(student)
        self.threshold = -1.0  # none yet

    def begin_stream(self, student: Student) -> None:
        super().begin_stream(student)
        self.threshold = -1.0  # the classes are others now

    def stream_loss(self, student: Student, pixels: Tensor) -> Guess:
        new, old = self.logits(student, pixels), self.taught(student, pixels)
        sure = old.softmax(dim=1).max(dim=1)
        mean = sure.values.mean().item()
        past = mean if self.threshold < 0 else self.threshold
        self.threshold = self.memory * past + (1 - self.memory) * mean
        high = sure.values >= self.threshold  # [B]
        target = torch.nn.functional.one_hot(sure.indices, old.shape[1]).to(new.dtype)
        unlikely = old.softmax(dim=1) < 1 / old.shape[1]  # [B, C]: less than by chance
        each = torch.where(high, cross_entropy_to(new, target), complementary(new, unlikely))
        return self.guess(new, old, each.mean())

    def tensors(self) -> Tensors:
        return {"threshold": torch.tensor(self.threshold, dtype=torch.float64)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.threshold = tensors["threshold"].item()
