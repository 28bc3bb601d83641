"""Tent: minimise the entropy of predictions in the normalisation layers.

CLIP has no BatchNorm. As in other ports, the affine weights of the image tower's LayerNorms train,
and the class embeddings stay fixed.
"""

from torch import Tensor

from dosapp.functional.losses import entropy
from dosapp.methods.base import AdaptResult, Method, method_dataclass
from dosapp.student.student import Student
from dosapp.student.trainable_weights import Selection


@method_dataclass
class Tent(Method):
    """Test-time entropy minimisation."""

    summary = "minimise the entropy of predictions, LayerNorm weights only"
    reference = "Wang et al., 2021"
    phase = "unlabelled"

    def begin_stream(self, student: Student) -> None:
        student.set_trainable(Selection(tuple(student.backbone.image_norm_weights())))

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        logits = student.scaled_image_logits(pixels)
        return AdaptResult(logits.argmax(dim=1), entropy(logits).mean())
