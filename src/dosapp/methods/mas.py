"""MAS: a quadratic penalty on weights that the outputs are sensitive to."""

from collections.abc import Mapping

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from dosapp.functional.losses import quadratic_penalty
from dosapp.functional.named_tensors import select_prefix
from dosapp.methods.base import Batch, Method, Tensors, UnitInterval, method_dataclass
from dosapp.scenario import Session
from dosapp.student.student import Student

BATCH_SIZE = 64  # images per gradient of the importance


@method_dataclass
class MAS(Method):
    """Memory-aware synapses: L_CLIP + λ Σ Ω (θ - θ*)²."""

    summary = "penalise changes of important weights since the previous session"
    reference = "Aljundi et al., 2018"
    old_names = {"reg_lambda": "strength", "alpha": "keep"}

    reg_lambda: NonNegativeFloat = 0.1  # λ
    alpha: UnitInterval = 0.5  # Ω ← α Ω_old + (1 - α) Ω_new

    def setup(self, student: Student) -> None:
        self.importance: dict[str, Tensor] = {}  # Ω
        self.anchor: dict[str, Tensor] = {}  # θ*

    def loss(self, student: Student, batch: Batch) -> Tensor:
        return super().loss(student, batch) + self.reg_lambda * self.penalty(student)

    def penalty(self, student: Student) -> Tensor:
        """Σ Ω (θ - θ*)², zero in the first session."""
        return quadratic_penalty(student.backbone.weights(), self.anchor, self.importance)

    def end_session(self, student: Student, session: Session) -> None:
        """Ω_new: Σ |∇ Σ ‖logits‖²| over batches, each row scaled to a maximum of 1; θ* ← θ.

        Gradients are summed within a batch before the absolute value, as in SPU's code.
        """
        weights, count = student.backbone.own_weights(), len(session.train)
        total: dict[str, Tensor] = {}
        norms = (
            student.score_images(pixels).mul(student.backbone.logit_scale).square().sum()
            for pixels in session.train.batches(BATCH_SIZE)
        )
        for gradients in student.iter_gradients(weights, norms):
            for name, grad in gradients.items():
                total[name] = total.get(name, torch.zeros(())) + grad.abs()
        for name, summed in total.items():
            mean = summed / count
            row_max = mean.amax(dim=-1, keepdim=True) if mean.ndim else mean
            new = mean / row_max.clamp(min=torch.finfo(mean.dtype).tiny)
            old = self.importance.get(name)
            self.importance[name] = (
                new if old is None else self.alpha * old + (1 - self.alpha) * new
            )
            self.anchor[name] = weights[name].detach().clone()

    def state_dict(self) -> Tensors:
        importance = {f"importance/{name}": omega for name, omega in self.importance.items()}
        return importance | {f"anchor/{name}": weight for name, weight in self.anchor.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.importance = select_prefix("importance/", tensors)
        self.anchor = select_prefix("anchor/", tensors)
