"""LwF: distil the previous model's image → text logits on the images of the new session.

The previous model is the student at the start of the session. Replayed images take part in the
distillation only, not in the CLIP loss, as in SPU's code; the direction of the KL divergence is
LwF's, not SPU's (docs/methods.md#defects).
"""

from collections.abc import Mapping

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from dosapp.backbones.base import Backbone
from dosapp.functional.losses import clip_loss, distillation_loss
from dosapp.methods.base import Batch, Method, Tensors, method_dataclass
from dosapp.scenario import Session
from dosapp.student.student import Student


@method_dataclass
class LwF(Method):
    """Learning without forgetting: L_CLIP + weight · KL(previous ‖ current)."""

    summary = "distil the previous model's probabilities over captions"
    reference = "Li & Hoiem, 2016"
    old_names = {"distillation_weight": "weight"}

    distillation_weight: NonNegativeFloat = 0.01
    temperature: PositiveFloat = 5.0

    def setup(self, student: Student) -> None:
        self.previous_model: Backbone = student.shared_copy()
        self.sessions = 0

    def begin_session(self, student: Student, session: Session) -> None:
        student.sync_copy(self.previous_model)
        self.sessions += 1

    def loss(self, student: Student, batch: Batch) -> Tensor:
        images, texts = student.encode_pairs(batch.pixels, batch.labels)
        scale, new = student.backbone.logit_scale, ~batch.replayed
        negatives = student.encode_absent_captions(batch.labels[new])
        loss = clip_loss(images[new], texts[new], scale, negatives)
        if self.sessions < 2:  # there is no previous session
            return loss
        previous = self.previous_model
        with torch.inference_mode():
            old_images, old_texts = student.encode_pairs(batch.pixels, batch.labels, previous)
            old_logits = previous.logit_scale * old_images @ old_texts.T
        distillation = self.distill(scale * images @ texts.T, old_logits.clone())
        return loss + self.distillation_weight * distillation

    def distill(self, logits: Tensor, old_logits: Tensor) -> Tensor:
        """The distillation loss of logits images × captions `[B, B]`."""
        return distillation_loss(logits, old_logits, self.temperature)

    def shared_copies(self) -> Mapping[str, Backbone]:
        return {"old": self.previous_model}

    def state_dict(self) -> Tensors:
        return {"sessions": torch.tensor(self.sessions)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.sessions = int(tensors["sessions"])
