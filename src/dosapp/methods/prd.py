"""PRD: distil the previous model's softmax over the images of the batch, for each caption."""

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from dosapp.functional.losses import relation_distillation_loss
from dosapp.methods.base import method_dataclass
from dosapp.methods.lwf import LwF


@method_dataclass
class PRD(LwF):
    """Prototype-sample relation distillation, as ported to CLIP in SPU's comparison."""

    summary = "distil the previous model's ranking of images for each caption"
    reference = "Asadi et al., 2023"

    distillation_weight: NonNegativeFloat = 0.1
    temperature: PositiveFloat = 1.0

    def distill(self, logits: Tensor, old_logits: Tensor) -> Tensor:
        return relation_distillation_loss(logits, old_logits, self.temperature)
