"""CoTTA: learn from a slow teacher, averaged over augmentations where the source is unsure, and put
a few weights back where lessons ended after every step."""

from collections.abc import Mapping

import torch
from pydantic import PositiveInt
from torch import Tensor

from dosapp.backbones.base import Backbone, Expert
from dosapp.functional.augmentation import augment
from dosapp.functional.losses import soft_cross_entropy
from dosapp.functional.masks import Mask
from dosapp.methods.base import AdaptResult, UnitInterval, method_dataclass
from dosapp.methods.mean_teacher import MeanTeacher
from dosapp.student.student import Student


@method_dataclass
class CoTTA(MeanTeacher):
    summary = "follow an augmentation-averaged teacher, and restore a few weights at random"
    reference = "Wang et al., 2022"
    abilities = frozenset({"corrupted data"})

    restore: UnitInterval = 0.01  # of the entries that may move, each step
    unsure: UnitInterval = 0.72  # mean confidence of the source below which the teacher is averaged
    views: PositiveInt = 32  # augmentations averaged over

    def setup(self, student: Student) -> None:
        super().setup(student)
        self.source: Backbone = student.shared_copy()

    def begin_stream(self, student: Student) -> None:
        super().begin_stream(student)
        student.sync_copy(self.source)

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        new, old = self.student_logits(student, pixels), self.teachers_mean(student, pixels)
        return self.make_result(new, old, soft_cross_entropy(new, old.softmax(dim=1)).mean())

    @torch.no_grad()
    def teachers_mean(self, student: Student, pixels: Tensor) -> Tensor:
        source = self.source.logit_scale * student.logits(pixels, self.source)
        if source.softmax(dim=1).max(dim=1).values.mean() >= self.unsure:
            return self.teacher_logits(student, pixels)
        generator, texts = student.rng("cotta"), student.encode_captions(self.teacher)
        views = [
            self.teacher.logit_scale
            * self.teacher.encode_image(augment(pixels, generator))
            @ texts.T
            for _ in range(self.views)
        ]
        return torch.stack(views).mean(dim=0)

    def after_stream_step(self, student: Student) -> None:
        super().after_stream_step(student)
        generator = student.rng("restore")
        student.assign(
            {n: w for n, w in self.source.weights().items() if n in student.selection.names},
            drawn(student, self.restore, generator),
        )

    def shared_copies(self) -> Mapping[str, Backbone]:
        return {"teacher": self.teacher, "source": self.source}

    def experts(self, student: Student) -> Mapping[str, Expert]:
        return {"teacher": self.teacher, "student": student.backbone}


def drawn(student: Student, share: float, generator: torch.Generator) -> Mask:
    """Each entry that may move, with this probability."""
    weights, mask = student.backbone.weights(), student.selection.mask or {}
    found = {}
    for name in student.selection.names:
        hit = (torch.rand(weights[name].shape, generator=generator) < share).to(
            weights[name].device
        )
        found[name] = hit & mask[name] if name in mask else hit
    return found
