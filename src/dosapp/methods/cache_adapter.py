"""Adapters without gradients: the stream fills caches, and a head predicts with them.

The weights stay as the last session left them. A later session that trains makes cached features
stale, so its first step clears them.
"""

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from dosapp.backbones.base import Expert
from dosapp.heads.base import Head, HeadExpert
from dosapp.methods.base import AdaptResult, Method, method_dataclass
from dosapp.student.student import Student
from dosapp.student.trainable_weights import Selection


@method_dataclass
class CacheAdapter(Method):
    """The base of TDA and OGA."""

    phase = "unlabelled"

    def setup(self, student: Student) -> None:
        self.expert = HeadExpert(student.backbone, self.make_head())

    @abstractmethod
    def make_head(self) -> Head:
        """The head, with empty caches."""

    @abstractmethod
    def store(self, features: Tensor, logits: Tensor) -> None:
        """Put features `[B, D]` of stream images, with CLIP's logits `[B, C]`, into the caches."""

    @abstractmethod
    def clear(self) -> None:
        """Forget the cached features."""

    def after_step(self, student: Student) -> None:
        self.clear()

    def begin_stream(self, student: Student) -> None:
        student.set_trainable(Selection())

    @torch.no_grad()
    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        """Pseudo-labels of the head after the batch has entered the caches; there is no loss."""
        features, texts = student.backbone.encode_image(pixels), student.encode_captions()
        self.store(features, student.backbone.logit_scale * features @ texts.T)
        scores = self.answer(student).head.score(features, texts)
        return AdaptResult(scores.argmax(dim=1), stepped=True)

    def answer(self, student: Student) -> HeadExpert:
        """The student with the head, whose scale is the student's."""
        self.expert.head.scale = student.backbone.logit_scale.detach()  # type: ignore[attr-defined]
        return self.expert

    def experts(self, student: Student) -> Mapping[str, Expert]:
        return {type(self).__name__.lower(): self.answer(student), "student": student.backbone}
