"""Trust the student's own most likely class (D^u in the paper's tables)."""

from torch import Tensor

from dosapp.functional.losses import clip_loss
from dosapp.methods.base import Guess, Method, settings
from dosapp.student.student import Student


@settings
class SelfTraining(Method):
    idea = "learn from the student's own labels"
    reference = "the SPU + D^u row of Singh et al., 2026"
    phase = "unlabelled"

    def begin_stream(self, student: Student) -> None:
        student.train_only(student.chosen)  # the same weights, a fresh optimizer

    def stream_loss(self, student: Student, pixels: Tensor) -> Guess:
        images, texts = student.net.encode_image(pixels), student.captions()
        labels = (images @ texts.T).argmax(dim=1)
        return Guess(labels, clip_loss(images, texts[labels], student.net.scale))
