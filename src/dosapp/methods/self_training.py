"""Self-training: pseudo-labels by the student itself, the "+ D^u" rows of the paper's tables."""

from typing import ClassVar

from torch import Tensor

from dosapp.functional.losses import clip_loss
from dosapp.methods.base import AdaptResult, Method, Phase, method_dataclass
from dosapp.student.student import Student


@method_dataclass
class SelfTraining(Method):
    """The CLIP loss with the student's most likely class, on the weights of the last session."""

    summary = "the CLIP loss with the student's own pseudo-labels"
    reference = "the SPU + D^u row of Singh et al., 2026"
    phase: ClassVar[Phase] = "unlabelled"

    def begin_stream(self, student: Student) -> None:
        student.set_trainable(student.session_selection)  # with a new optimizer

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        images, texts = student.backbone.encode_image(pixels), student.encode_captions()
        labels = (images.detach() @ texts.detach().T).argmax(dim=1)
        loss = clip_loss(images, texts[labels], student.backbone.logit_scale)
        return AdaptResult(labels, loss, features=images.detach())
