"""Pseudo-labels from two experts (Eq. 5). Logits are cosines `[B, C]`."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def max_logit_labels(teacher: Tensor, student: Tensor) -> Tensor:
    """Per image, the label of the expert with the larger top logit; ties go to the teacher."""
    t, s = teacher.max(dim=1), student.max(dim=1)
    return torch.where(t.values >= s.values, t.indices, s.indices)


LABELLERS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "max-logit": max_logit_labels,
    "teacher": lambda teacher, student: teacher.argmax(dim=1),
    "student": lambda teacher, student: student.argmax(dim=1),
}
