"""SparCL, as a mask of what may move: weights themselves are never set to zero.

In every linear layer of both towers the entries with the largest |weight| + ½ |gradient| move. The
mask is chosen again every few epochs; at first a part of it is given to entries drawn at random.
"""

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from dosapp.functional.masks import Mask, Scores, top_count, top_fraction
from dosapp.methods.base import Batches, Fraction, Method, method_dataclass
from dosapp.student.selection import Selection
from dosapp.student.student import Student


@method_dataclass
class SparCL(Method):
    summary = "move the few weights of each layer that are largest and want to move"
    reference = "Wang et al., 2022"

    density: Fraction = 0.05  # share of each layer's entries that moves
    kept: Fraction = 0.04  # of those, chosen by importance in the first epochs; the rest at random
    every: PositiveInt = 5  # epochs between masks
    gradient: NonNegativeFloat = 0.5  # its part in the importance

    def __post_init__(self) -> None:
        if self.kept > self.density:
            raise ValueError(f"cannot keep {self.kept:g} in a mask of {self.density:g}")

    def select_parameters(self, student: Student, lessons: Batches) -> Selection:
        importance = self.importance(student, lessons)
        mask = self.mask(student, 0, importance)
        return Selection(tuple(mask), mask, importance)

    def begin_epoch(self, student: Student, epoch: int, lessons: Batches) -> None:
        if epoch > 0 and epoch % self.every == 0:
            student.change_mask(self.mask(student, epoch, self.importance(student, lessons)))

    def importance(self, student: Student, lessons: Batches) -> Scores:
        weights = student.backbone.linear_weights()
        wanting = student.score_weights(weights, (self.loss(student, batch) for batch in lessons))
        return {n: w.detach().abs() + self.gradient * wanting[n] for n, w in weights.items()}

    def mask(self, student: Student, epoch: int, importance: Scores) -> Mask:
        first = epoch < self.every
        mask = top_fraction(importance, self.kept if first else self.density)
        return {n: grown(m, self.density, student.rng(n, epoch)) for n, m in mask.items()}


def grown(mask: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """The mask with entries drawn at random until it has this density."""
    missing = top_count(density, mask.numel()) - int(mask.sum())
    outside = (~mask).flatten().nonzero().squeeze(1)
    drawn = outside[torch.randperm(len(outside), generator=generator)[: max(0, missing)]]
    result = mask.clone()
    result.view(-1)[drawn] = True
    return result
