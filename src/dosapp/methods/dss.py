"""A reading of DSS after its abstract, all of it that could be had: learn from sure images what
they are, from unsure ones what they are not.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dosapp.functional.losses import complementary_loss, soft_cross_entropy
from dosapp.methods.base import AdaptResult, Decay, Tensors, method_dataclass
from dosapp.methods.mean_teacher import MeanTeacher
from dosapp.student.student import Student


@method_dataclass
class DSS(MeanTeacher):
    summary = "learn what sure images are and what unsure ones are not"
    reference = "after the abstract of Wang et al., 2024"
    abilities = frozenset({"corrupted data"})

    memory: Decay = 0.9  # of the moving threshold

    def setup(self, student: Student) -> None:
        super().setup(student)
        self.threshold = -1.0  # none yet

    def begin_stream(self, student: Student) -> None:
        super().begin_stream(student)
        self.threshold = -1.0  # the classes are others now

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        new, old = self.student_logits(student, pixels), self.teacher_logits(student, pixels)
        sure = old.softmax(dim=1).max(dim=1)
        mean = sure.values.mean().item()
        past = mean if self.threshold < 0 else self.threshold
        self.threshold = self.memory * past + (1 - self.memory) * mean
        high = sure.values >= self.threshold  # [B]
        target = torch.nn.functional.one_hot(sure.indices, old.shape[1]).to(new.dtype)
        unlikely = old.softmax(dim=1) < 1 / old.shape[1]  # [B, C]: less than by chance
        each = torch.where(high, soft_cross_entropy(new, target), complementary_loss(new, unlikely))
        return self.make_result(new, old, each.mean())

    def state_dict(self) -> Tensors:
        return {"threshold": torch.tensor(self.threshold, dtype=torch.float64)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.threshold = tensors["threshold"].item()
