"""EATA: entropy minimisation on reliable and non-redundant images, with a Fisher penalty.

As in Tent, only the image tower's LayerNorm weights train.
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

BATCH_SIZE = 64  # images per gradient of the Fisher information


def select_samples(
    logits: Tensor, mean_probs: Tensor | None, e_margin: float, d_margin: float
) -> tuple[Tensor, Tensor]:
    """Images to train on `[B]` and their weights exp(E0 - entropy) `[B]` (Eq. 2 to 6 of EATA).

    Reliable: entropy below E0 = e_margin · ln C. Non-redundant: |cosine| of the probabilities to
    `mean_probs`, the moving mean over the images selected so far, below `d_margin`.
    """
    limit = e_margin * math.log(logits.shape[1])
    entropies = entropy(logits)
    selected = entropies < limit
    if mean_probs is not None:
        similarity = cosine_similarity(mean_probs[None], logits.softmax(dim=1))
        selected &= similarity.abs() < d_margin
    return selected, (limit - entropies).exp()


@method_dataclass
class EATA(Tent):
    """Efficient test-time adaptation with anti-forgetting: Σ w · entropy + α Σ F (θ - θ0)²."""

    summary = "Tent on reliable, non-redundant images, with a Fisher penalty"
    reference = "Niu et al., 2022"
    abilities = frozenset({"corrupted data", "reduces forgetting"})
    old_names = {
        "e_margin": "margin",
        "d_margin": "likeness",
        "fisher_alpha": "pull",
        "decay": "memory",
    }

    e_margin: PositiveFloat = 0.4  # E0 / ln C
    d_margin: Fraction = 0.1  # ε
    fisher_alpha: NonNegativeFloat = 1.0  # α
    decay: Decay = 0.9  # of the moving mean of probabilities

    def setup(self, student: Student) -> None:
        self.fisher: dict[str, Tensor] = {}  # F
        self.anchor: dict[str, Tensor] = {}  # θ0
        self.mean_probs: Tensor | None = None  # [C]

    def end_session(self, student: Student, session: Session) -> None:
        """F: mean squared mini-batch gradient of the cross-entropy to the model's own labels."""
        weights = student.backbone.image_norm_weights()
        logits = (
            student.scaled_image_logits(pixels) for pixels in session.train.batches(BATCH_SIZE)
        )
        gradients = student.iter_gradients(weights, self_label_losses(logits))
        self.fisher = fisher_information(gradients)
        self.anchor = {name: weight.detach().clone() for name, weight in weights.items()}
        self.mean_probs = None  # there are new classes

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        logits = student.scaled_image_logits(pixels)
        with torch.no_grad():
            selected, weight = select_samples(logits, self.mean_probs, self.e_margin, self.d_margin)
            labels = logits.argmax(dim=1)
            if not selected.any():
                return AdaptResult(labels)
            mean = logits[selected].softmax(dim=1).mean(dim=0)
            old = mean if self.mean_probs is None else self.mean_probs
            self.mean_probs = self.decay * old + (1 - self.decay) * mean
        loss = (entropy(logits[selected]) * weight[selected]).mean()
        return AdaptResult(labels, loss + self.fisher_alpha * self.penalty(student))

    def penalty(self, student: Student) -> Tensor:
        """Σ F (θ - θ0)²."""
        return quadratic_penalty(student.backbone.weights(), self.anchor, self.fisher)

    def remove_class(self, index: int) -> None:
        self.mean_probs = None

    def state_dict(self) -> Tensors:
        state = {f"fisher/{name}": f for name, f in self.fisher.items()}
        state |= {f"anchor/{name}": weight for name, weight in self.anchor.items()}
        return state | ({} if self.mean_probs is None else {"familiar": self.mean_probs})

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.fisher = select_prefix("fisher/", tensors)
        self.anchor = select_prefix("anchor/", tensors)
        self.mean_probs = tensors.get("familiar")
