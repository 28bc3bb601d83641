"""CoTTA: a mean teacher averaged over augmentations, and stochastic restoration of weights.

The source model is the student at the end of the last session.
"""

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
    """Continual test-time adaptation: cross-entropy to the teacher; the teacher answers."""

    summary = "an augmentation-averaged teacher, and random restoration of a few weights"
    reference = "Wang et al., 2022"
    abilities = frozenset({"corrupted data"})
    old_names = {"restore_prob": "restore", "ap": "unsure", "num_augmentations": "views"}

    restore_prob: UnitInterval = 0.01  # of each trainable entry, per step
    ap: UnitInterval = 0.72  # p_th: mean confidence of the source below which to average
    num_augmentations: PositiveInt = 32

    def setup(self, student: Student) -> None:
        super().setup(student)
        self.source: Backbone = student.shared_copy()

    def begin_stream(self, student: Student) -> None:
        super().begin_stream(student)
        student.sync_copy(self.source)

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        logits = self.student_logits(student, pixels)
        targets = self.averaged_logits(student, pixels)
        loss = soft_cross_entropy(logits, targets.softmax(dim=1)).mean()
        return self.make_result(logits, targets, loss)

    @torch.no_grad()
    def averaged_logits(self, student: Student, pixels: Tensor) -> Tensor:
        """The teacher's logits; their mean over augmentations if the source is not confident."""
        source_logits = self.source.logit_scale * student.score_images(pixels, self.source)
        if source_logits.softmax(dim=1).max(dim=1).values.mean() >= self.ap:
            return self.teacher_logits(student, pixels)
        generator, texts = student.rng("cotta"), student.encode_captions(self.teacher)
        scale, encode = self.teacher.logit_scale, self.teacher.encode_image
        logits = [
            scale * encode(augment(pixels, generator)) @ texts.T
            for _ in range(self.num_augmentations)
        ]
        return torch.stack(logits).mean(dim=0)

    def after_stream_step(self, student: Student) -> None:
        """Update the teacher, then set random entries of the student to the source's values."""
        super().after_stream_step(student)
        names = student.selection.names
        source = {n: w for n, w in self.source.weights().items() if n in names}
        student.assign(source, random_mask(student, self.restore_prob, student.rng("restore")))

    def shared_copies(self) -> Mapping[str, Backbone]:
        return {"teacher": self.teacher, "source": self.source}

    def experts(self, student: Student) -> Mapping[str, Expert]:
        return {"teacher": self.teacher, "student": student.backbone}


def random_mask(student: Student, probability: float, generator: torch.Generator) -> Mask:
    """Draw each trainable entry with this probability."""
    weights, trainable = student.backbone.weights(), student.selection.mask or {}
    mask = {}
    for name in student.selection.names:
        drawn = torch.rand(weights[name].shape, generator=generator) < probability
        drawn = drawn.to(weights[name].device)
        mask[name] = drawn & trainable[name] if name in trainable else drawn
    return mask
