"""EATA: learn from images that are sure and not yet familiar, and stay near where lessons ended.

As in Tent, only the image tower's LayerNorm weights move.
"""

import math
from collections.abc import Mapping

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn.functional import cosine_similarity

from dosapp.functional.fisher import fisher_information, self_label_losses
from dosapp.functional.losses import entropy, quadratic_penalty
from dosapp.functional.named_tensors import select_prefix
from dosapp.methods.base import AdaptResult, Decay, Fraction, Tensors, method_dataclass
from dosapp.methods.tent import Tent
from dosapp.scenario import Session
from dosapp.student.student import Student

LOOK = 64  # images per gradient of the Fisher information


def sure_and_new(
    logits: Tensor, familiar: Tensor | None, margin: float, likeness: float
) -> tuple[Tensor, Tensor]:
    """Which images to learn from `[B]`, and their weights exp(E0 - entropy) (Eq. 2 to 6 of EATA).

    Sure: entropy below E0 = margin · ln C. New: |cosine| of the probabilities to the moving mean of
    those learned from so far is below `likeness`; before there is one, everything is new.
    """
    limit = margin * math.log(logits.shape[1])
    unsure = entropy(logits)
    keep = unsure < limit
    if familiar is not None:
        keep &= cosine_similarity(familiar[None], logits.softmax(dim=1)).abs() < likeness
    return keep, (limit - unsure).exp()


@method_dataclass
class EATA(Tent):
    summary = "Tent on sure and unfamiliar images, with a Fisher pull to where lessons ended"
    reference = "Niu et al., 2022"
    abilities = frozenset({"corrupted data", "reduces forgetting"})

    margin: PositiveFloat = 0.4  # E0 / ln C
    likeness: Fraction = 0.1  # ε
    pull: NonNegativeFloat = 1.0  # α
    memory: Decay = 0.9  # of the moving mean

    def setup(self, student: Student) -> None:
        self.fisher: dict[str, Tensor] = {}
        self.anchor: dict[str, Tensor] = {}
        self.familiar: Tensor | None = None

    def end_session(self, student: Student, session: Session) -> None:
        """F: mean squared mini-batch gradient of the likelihood of the model's own labels."""
        weights = student.backbone.image_norm_weights()
        answers = (student.image_logits(pixels) for pixels in session.train.batches(LOOK))
        self.fisher = fisher_information(
            student.iter_gradients(self_label_losses(answers), weights)
        )
        self.anchor = {name: weight.detach().clone() for name, weight in weights.items()}
        self.familiar = None  # the classes are others now

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        logits = student.image_logits(pixels)
        with torch.no_grad():
            keep, weight = sure_and_new(logits, self.familiar, self.margin, self.likeness)
            labels = logits.argmax(dim=1)
            if not keep.any():
                return AdaptResult(labels)
            mean = logits[keep].softmax(dim=1).mean(dim=0)
            old = mean if self.familiar is None else self.familiar
            self.familiar = self.memory * old + (1 - self.memory) * mean
        loss = (entropy(logits[keep]) * weight[keep]).mean()
        return AdaptResult(labels, loss + self.pull * self.penalty(student))

    def penalty(self, student: Student) -> Tensor:
        """Σ F (θ - θ0)²."""
        return quadratic_penalty(student.backbone.weights(), self.anchor, self.fisher)

    def remove_class(self, index: int) -> None:
        self.familiar = None

    def state_dict(self) -> Tensors:
        kept = {f"fisher/{name}": f for name, f in self.fisher.items()}
        kept |= {f"anchor/{name}": weight for name, weight in self.anchor.items()}
        return kept | ({} if self.familiar is None else {"familiar": self.familiar})

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.fisher, self.anchor = (
            select_prefix("fisher/", tensors),
            select_prefix("anchor/", tensors),
        )
        self.familiar = tensors.get("familiar")
