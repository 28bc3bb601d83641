"""PSMT: a mean teacher with a Fisher penalty and restoration of the least important weights.

The source is the student at the end of the last session. The released code updates the teacher
twice per step and encodes the same image twice; here each happens once (docs/methods.md#defects).
"""

from collections.abc import Mapping

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from dosapp.functional.fisher import fisher_information, self_label_losses
from dosapp.functional.losses import quadratic_penalty, symmetric_cross_entropy
from dosapp.functional.named_tensors import select_prefix
from dosapp.methods.base import AdaptResult, Tensors, UnitInterval, method_dataclass
from dosapp.methods.mean_teacher import MeanTeacher
from dosapp.scenario import Session
from dosapp.student.student import Student


@method_dataclass
class PSMT(MeanTeacher):
    """Symmetric cross-entropy to the teacher + α Σ F (θ - θ_source)²."""

    summary = "penalise changes of important weights and restore unimportant ones"
    reference = "Tian & Lyu, 2024"
    abilities = frozenset({"corrupted data"})
    old_names = {"fisher_alpha": "pull", "restore_ratio": "restore"}

    fisher_alpha: NonNegativeFloat = 500.0  # α
    restore_ratio: UnitInterval = 0.03  # share of entries, those with the least squared gradient

    def setup(self, student: Student) -> None:
        super().setup(student)
        self.fisher: dict[str, Tensor] = {}  # F
        self.source: dict[str, Tensor] = {}  # θ_source

    def end_session(self, student: Student, session: Session) -> None:
        """F: mean squared mini-batch gradient of the cross-entropy to the model's own labels."""
        names = student.session_selection.names
        weights = {n: w for n, w in student.backbone.weights().items() if n in names}
        logits = (self.student_logits(student, pixels) for pixels in session.train.batches(64))
        gradients = student.iter_gradients(weights, self_label_losses(logits))
        self.fisher = fisher_information(gradients)

    def begin_stream(self, student: Student) -> None:
        super().begin_stream(student)
        weights = student.backbone.weights()
        self.source = {n: weights[n].detach().clone() for n in student.selection.names}

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        logits = self.student_logits(student, pixels)
        teacher_logits = self.teacher_logits(student, pixels)
        loss = symmetric_cross_entropy(logits, teacher_logits).mean()
        penalty = quadratic_penalty(student.backbone.weights(), self.source, self.fisher)
        return self.make_result(logits, teacher_logits, loss + self.fisher_alpha * penalty)

    def after_stream_step(self, student: Student) -> None:
        """Update the teacher, then restore the least important entries of student and teacher."""
        super().after_stream_step(student)
        mask = least_important(
            {name: grad.square() for name, grad in student.last_gradients().items()},
            student.selection.mask or {},
            self.restore_ratio,
        )
        values = {name: self.source[name] for name in mask}
        student.assign(values, mask)
        teacher = self.teacher.weights()
        restored = {n: torch.where(mask[n], value, teacher[n]) for n, value in values.items()}
        student.load_copy(self.teacher, restored)

    def state_dict(self) -> Tensors:
        state = {f"fisher/{name}": f for name, f in self.fisher.items()}
        return state | {f"source/{name}": weight for name, weight in self.source.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.fisher = select_prefix("fisher/", tensors)
        self.source = select_prefix("source/", tensors)


def least_important(
    importance: Mapping[str, Tensor], mask: Mapping[str, Tensor], ratio: float
) -> dict[str, Tensor]:
    """A mask of the least important entries: this share of all that changed.

    Entries with zero importance (embeddings of tokens in no caption) did not change and are left
    out: they would use up the share.
    """
    changed = {n: mask.get(n, torch.tensor(True)) & (f > 0) for n, f in importance.items()}
    values = torch.cat([importance[n][m] for n, m in changed.items()] or [torch.zeros(0)])
    count = round(ratio * len(values))
    if not count:
        return {}
    threshold = values.kthvalue(count).values
    return {n: m & (importance[n] <= threshold) for n, m in changed.items()}
