"""MagMax: the entries of largest magnitude over the task vectors of all sessions.

The task vector of a session is what training, one session after the other, has added to the
pretrained weights so far: τ_t = θ_t - θ_0. The merged weights θ_0 + λ τ_max predict and adapt to
the stream; the next session continues from θ_t, plus what the stream has changed since.
"""

from collections.abc import Mapping

import torch
from pydantic import PositiveFloat
from torch import Tensor

from dosapp.backbones.base import Backbone
from dosapp.functional.named_tensors import select_prefix
from dosapp.methods.base import Tensors, method_dataclass
from dosapp.methods.staged import Stage
from dosapp.scenario import Session
from dosapp.student.student import Student


@method_dataclass
class MagMax(Stage):
    """θ_0 + λ · (entry of largest magnitude over τ_1 … τ_t)."""

    summary = "merge the sessions' task vectors by their entries of largest magnitude"
    reference = "Marczak et al., 2024"
    role = "merging"

    scaling_coef: PositiveFloat = 0.5  # λ

    def setup(self, student: Student) -> None:
        self.original: Backbone = student.shared_copy()  # θ_0
        self.sequential: Backbone = student.shared_copy()  # θ_t
        self.largest: dict[str, Tensor] = {}  # τ_max

    @torch.no_grad()
    def resume_training(self, student: Student) -> None:
        """θ ← θ_t + (θ - merged)."""
        weights, sequential = student.backbone.weights(), self.sequential.weights()
        student.assign(
            {n: sequential[n] + (weights[n] - self.merge_weight(n)) for n in self.largest}
        )

    @torch.no_grad()
    def end_training(self, student: Student, session: Session) -> None:
        original = self.original.weights()
        student.sync_copy(self.sequential)
        for name in sorted(student.ever_selected):
            vector = student.backbone.weights()[name] - original[name]
            known = self.largest.get(name, torch.zeros_like(vector))
            self.largest[name] = torch.where(vector.abs() > known.abs(), vector, known)
        student.assign({name: self.merge_weight(name) for name in self.largest})

    def merge_weight(self, name: str) -> Tensor:
        """A weight after merging."""
        return self.original.weights()[name] + self.scaling_coef * self.largest[name]

    def end_session(self, student: Student, session: Session) -> None:
        student.weights_assigned = bool(self.largest)  # also after an alignment: teachers follow

    def shared_copies(self) -> Mapping[str, Backbone]:
        return {"original": self.original, "sequential": self.sequential}

    def state_dict(self) -> Tensors:
        return {f"largest/{name}": vector for name, vector in self.largest.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.largest = select_prefix("largest/", tensors)
