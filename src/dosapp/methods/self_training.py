"""Trust the student's own most likely class (D^u in the paper's tables)."""

from torch import Tensor

from dosapp.functional.losses import clip_loss
from dosapp.methods.base import AdaptResult, Method, method_dataclass
from dosapp.student.student import Student


@method_dataclass
class SelfTraining(Method):
    summary = "learn from the student's own labels"
    reference = "the SPU + D^u row of Singh et al., 2026"
    phase = "unlabelled"

    def begin_stream(self, student: Student) -> None:
        student.set_trainable(student.session_selection)  # the same weights, a fresh optimizer

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        images, texts = student.backbone.encode_image(pixels), student.encode_captions()
        labels = (images @ texts.T).argmax(dim=1)
        return AdaptResult(labels, clip_loss(images, texts[labels], student.backbone.logit_scale))
