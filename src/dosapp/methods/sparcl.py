"""SparCL as a mask of updates: weights outside the mask stay fixed; none is set to zero.

In every linear layer of both towers the entries with the largest |weight| + ½ |gradient| train. The
mask is computed again every few epochs; in the first epochs a part of it is drawn at random.
"""

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from dosapp.functional.masks import Mask, Scores, top_count, top_fraction
from dosapp.methods.base import Batches, Fraction, Method, method_dataclass
from dosapp.student.student import Student
from dosapp.student.trainable_weights import Selection


@method_dataclass
class SparCL(Method):
    """Sparse continual learning with a dynamic mask."""

    summary = "update the few weights of each layer that are largest in weight and gradient"
    reference = "Wang et al., 2022"
    old_names = {
        "retained_density": "kept",
        "mask_interval": "every",
        "gradient_weight": "gradient",
    }

    density: Fraction = 0.05  # share of each layer's entries in the mask
    retained_density: Fraction = 0.04  # of it by importance in the first epochs; the rest is random
    mask_interval: PositiveInt = 5  # epochs between masks
    gradient_weight: NonNegativeFloat = 0.5  # of |gradient| in the importance

    def __post_init__(self) -> None:
        if self.retained_density > self.density:
            raise ValueError(
                f"retained_density {self.retained_density:g} is larger than density "
                f"{self.density:g}; give at most the density"
            )

    def select_parameters(self, student: Student, batches: Batches) -> Selection:
        importance = self.importance(student, batches)
        mask = self.compute_mask(student, 0, importance)
        return Selection(tuple(mask), mask, importance)

    def begin_epoch(self, student: Student, epoch: int, batches: Batches) -> None:
        if epoch > 0 and epoch % self.mask_interval == 0:
            importance = self.importance(student, batches)
            student.change_mask(self.compute_mask(student, epoch, importance))

    def importance(self, student: Student, batches: Batches) -> Scores:
        """|w| + ½ |g| of every entry of the linear layers."""
        weights = student.backbone.linear_weights()
        losses = (self.loss(student, batch) for batch in batches)
        gradients = student.gradient_scores(weights, losses)
        return {
            n: w.detach().abs() + self.gradient_weight * gradients[n] for n, w in weights.items()
        }

    def compute_mask(self, student: Student, epoch: int, importance: Scores) -> Mask:
        """The top entries of each layer, filled at random to the density."""
        is_first = epoch < self.mask_interval
        mask = top_fraction(importance, self.retained_density if is_first else self.density)
        return {n: grow_mask(m, self.density, student.rng(n, epoch)) for n, m in mask.items()}


def grow_mask(mask: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """Add random entries to a mask until it has this density."""
    missing = top_count(density, mask.numel()) - int(mask.sum())
    outside = (~mask).flatten().nonzero().squeeze(1)
    added = outside[torch.randperm(len(outside), generator=generator)[: max(0, missing)]]
    result = mask.clone()
    result.view(-1)[added] = True
    return result
