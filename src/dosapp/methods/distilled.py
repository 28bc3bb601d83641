"""Two ways to keep the old model's answers on new images: LwF and PRD.

The old model is the student as it was when the session began. VersionTensors images take part in the
distillation only, never in the CLIP loss, as in SPU's code; the direction of the divergence is the
textbook's (docs/methods.md#defects).
"""

from collections.abc import Mapping

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from dosapp.backbones.base import Backbone
from dosapp.functional.losses import clip_loss, distillation_loss, relation_distillation_loss
from dosapp.methods.base import Batch, Method, Tensors, method_dataclass
from dosapp.scenario import Session
from dosapp.student.student import Student


@method_dataclass
class LwF(Method):
    summary = "keep the old model's captions for each image"
    reference = "Li & Hoiem, 2016"

    weight: NonNegativeFloat = 0.01
    temperature: PositiveFloat = 5.0

    def setup(self, student: Student) -> None:
        self.old: Backbone = student.shared_copy()
        self.sessions = 0

    def begin_session(self, student: Student, session: Session) -> None:
        student.sync_copy(self.old)
        self.sessions += 1

    def loss(self, student: Student, batch: Batch) -> Tensor:
        images, texts = student.encode_pairs(batch.pixels, batch.labels)
        scale, now = student.backbone.logit_scale, ~batch.replayed
        rivals = student.encode_absent_captions(batch.labels[now])
        loss = clip_loss(images[now], texts[now], scale, rivals)
        if self.sessions < 2:  # nothing to keep yet
            return loss
        with torch.inference_mode():
            old_images, old_texts = student.encode_pairs(batch.pixels, batch.labels, self.old)
            old = self.old.logit_scale * old_images @ old_texts.T
        return loss + self.weight * self.keep(scale * images @ texts.T, old.clone())

    def keep(self, new: Tensor, old: Tensor) -> Tensor:
        """What it costs to answer differently; logits are images × captions `[B, B]`."""
        return distillation_loss(new, old, self.temperature)

    def shared_copies(self) -> Mapping[str, Backbone]:
        return {"old": self.old}

    def state_dict(self) -> Tensors:
        return {"sessions": torch.tensor(self.sessions)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.sessions = int(tensors["sessions"])


@method_dataclass
class PRD(LwF):
    summary = "keep the old model's ranking of images for each caption"
    reference = "Asadi et al., 2023"

    weight: NonNegativeFloat = 0.1
    temperature: PositiveFloat = 1.0

    def keep(self, new: Tensor, old: Tensor) -> Tensor:
        return relation_distillation_loss(new, old, self.temperature)
