"""DSS-style: positive learning on confident images, negative learning on the others.

An interpretation of the abstract of DSS, the only part that was available: not a port.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dosapp.functional.losses import complementary_loss, soft_cross_entropy
from dosapp.methods.base import AdaptResult, Decay, Tensors, method_dataclass
from dosapp.methods.mean_teacher import MeanTeacher
from dosapp.student.student import Student


@method_dataclass
class DSS(MeanTeacher):
    """Dynamic sample selection by a moving threshold on the teacher's confidence."""

    summary = "positive learning on confident images, negative learning on the others"
    reference = "after the abstract of Wang et al., 2024"
    abilities = frozenset({"corrupted data"})
    old_names = {"decay": "memory"}

    decay: Decay = 0.9  # of the moving threshold

    def setup(self, student: Student) -> None:
        super().setup(student)
        self.threshold = -1.0  # not set yet

    def begin_stream(self, student: Student) -> None:
        super().begin_stream(student)
        self.threshold = -1.0  # there are new classes

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        logits = self.student_logits(student, pixels)
        teacher_logits = self.teacher_logits(student, pixels)
        probabilities, classes = teacher_logits.softmax(dim=1), logits.shape[1]
        confidence, labels = probabilities.max(dim=1)
        mean = confidence.mean().item()
        old = mean if self.threshold < 0 else self.threshold
        self.threshold = self.decay * old + (1 - self.decay) * mean
        positive = soft_cross_entropy(logits, one_hot(labels, classes).to(logits.dtype))
        negative = complementary_loss(logits, probabilities < 1 / classes)  # less than by chance
        losses = torch.where(confidence >= self.threshold, positive, negative)  # [B]
        return self.make_result(logits, teacher_logits, losses.mean())

    def state_dict(self) -> Tensors:
        return {"threshold": torch.tensor(self.threshold, dtype=torch.float64)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.threshold = tensors["threshold"].item()
