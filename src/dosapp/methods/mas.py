"""Decay-aware synapses: weights that the answers depend on are expensive to move."""

from collections.abc import Mapping

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from dosapp.functional.losses import quadratic_penalty
from dosapp.functional.named_tensors import select_prefix
from dosapp.methods.base import Batch, Method, Tensors, UnitInterval, method_dataclass
from dosapp.scenario import Session
from dosapp.student.student import Student

LOOK = 64  # images per gradient of the importance


@method_dataclass
class MAS(Method):
    summary = "pull important weights back to where the last session left them"
    reference = "Aljundi et al., 2018"

    strength: NonNegativeFloat = 0.1  # λ
    keep: UnitInterval = 0.5  # share of the old importance that stays

    def setup(self, student: Student) -> None:
        self.importance: dict[str, Tensor] = {}
        self.anchor: dict[str, Tensor] = {}

    def loss(self, student: Student, batch: Batch) -> Tensor:
        return super().loss(student, batch) + self.strength * self.penalty(student)

    def penalty(self, student: Student) -> Tensor:
        """Σ Ω (θ - θ*)², zero in the first session."""
        return quadratic_penalty(student.backbone.weights(), self.anchor, self.importance)

    def end_session(self, student: Student, session: Session) -> None:
        """Ω: |∇ Σ ‖logits‖²| of each batch of images (signs meet before the absolute value is
        taken, as in SPU's code), added up; each row of a tensor scaled to a maximum of 1."""
        weights, count = student.backbone.tower_weights(), len(session.train)
        total: dict[str, Tensor] = {}
        norms = (  # a batch weighs as many images as it has: the sum over them, not their mean
            student.logits(pixels).mul(student.backbone.logit_scale).square().sum()
            for pixels in session.train.batches(LOOK)
        )
        for found in student.iter_gradients(norms, weights):
            for name, grad in found.items():
                total[name] = total.get(name, torch.zeros(())) + grad.abs()
        for name, summed in total.items():
            mean = summed / count
            top = mean.amax(dim=-1, keepdim=True) if mean.ndim else mean
            fresh = mean / top.clamp(min=torch.finfo(mean.dtype).tiny)
            old = self.importance.get(name)
            blend = fresh if old is None else self.keep * old + (1 - self.keep) * fresh
            self.importance[name] = blend
            self.anchor[name] = weights[name].detach().clone()

    def state_dict(self) -> Tensors:
        kept = {f"importance/{name}": omega for name, omega in self.importance.items()}
        return kept | {f"anchor/{name}": weight for name, weight in self.anchor.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.importance = select_prefix("importance/", tensors)
        self.anchor = select_prefix("anchor/", tensors)
