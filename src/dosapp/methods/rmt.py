"""RMT: a mean teacher, symmetric cross-entropy, and a pull of features to their class's prototype.

Source-free: prototypes are the mean features of each class when it was taught, and no pictures of
old classes are replayed. The projector of the contrastive term learns on the stream with the rest.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn.functional import normalize

from dosapp.backbones.base import Backbone
from dosapp.backbones.wrappers import BackboneWrapper, find_wrapper
from dosapp.functional.augmentation import augment
from dosapp.functional.class_indices import remove_class_index
from dosapp.functional.losses import supervised_contrastive_loss, symmetric_cross_entropy
from dosapp.methods.base import AdaptResult, Tensors, method_dataclass
from dosapp.methods.mean_teacher import MeanTeacher
from dosapp.runtime.rng import torch_rng
from dosapp.scenario import Session
from dosapp.student.student import Student

LOOK, SPACE = 64, 128  # images per look at the lessons, dimensions of the projector


class Projector(BackboneWrapper):
    """Features D → 128 → ReLU → 128, for the contrastive term only."""

    def __init__(self, inner: Backbone, seed: int) -> None:
        generator, wide = torch_rng("projector", seed), inner.embed_dim
        extra = {
            "rmt.first": torch.randn(wide, SPACE, generator=generator) / wide**0.5,
            "rmt.second": torch.randn(SPACE, SPACE, generator=generator) / SPACE**0.5,
        }
        super().__init__(inner, extra)

    def __call__(self, features: Tensor) -> Tensor:
        hidden = (features @ self.extra["rmt.first"]).relu()
        return normalize(hidden @ self.extra["rmt.second"], dim=-1)


@method_dataclass
class RMT(MeanTeacher):
    summary = "agree with a slow teacher, also on augmented images, near the class prototypes"
    reference = "Döbler et al., 2023"
    abilities = frozenset({"corrupted data"})

    agree: NonNegativeFloat = 1.0  # of the symmetric cross-entropy
    contrast: NonNegativeFloat = 1.0  # of the contrastive term
    temperature: PositiveFloat = 0.1

    def wrap_backbone(self, net: Backbone, seed: int) -> Backbone:
        return Projector(net, seed)

    def setup(self, student: Student) -> None:
        super().setup(student)
        self.prototypes: dict[int, Tensor] = {}  # by position in student.classes

    def check_session(self, student: Student, session: Session) -> None:
        if self.contrast:
            session.check_images("rmt has no prototype of it")

    def end_session(self, student: Student, session: Session) -> None:
        """Mean unit feature of each class taught."""
        with torch.no_grad():
            batches = [student.backbone.encode_image(x) for x in session.train.batches(LOOK)]
        features, labels = torch.cat(batches), torch.from_numpy(session.train.labels)
        for label in labels.unique().tolist():
            place = student.classes.index(session.classes[label])
            self.prototypes[place] = features[labels == label].mean(dim=0)

    def begin_stream(self, student: Student) -> None:
        super().begin_stream(student)
        if student.session_selection.names and self.contrast:
            extra = tuple(find_wrapper(student.backbone, Projector).extra)
            student.set_trainable(
                replace(student.session_selection, names=(*student.session_selection.names, *extra))
            )

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        net = student.backbone
        texts, scale = student.encode_captions(), net.logit_scale.detach()
        images = net.encode_image(pixels)
        moved = net.encode_image(augment(pixels, student.rng("rmt")))
        plain, other = scale * images @ texts.T, scale * moved @ texts.T
        old = self.teacher_logits(student, pixels)
        agree = (symmetric_cross_entropy(plain, old) + symmetric_cross_entropy(other, old)) / 2
        loss = self.agree * agree.mean()
        if self.contrast:
            known = torch.stack(list(self.prototypes.values()))
            nearest = known[(normalize(images.detach(), dim=1) @ normalize(known).T).argmax(dim=1)]
            views = find_wrapper(net, Projector)(torch.stack([nearest, images, moved]))
            loss = loss + self.contrast * supervised_contrastive_loss(views, self.temperature)
        return self.make_result(plain, old, loss)

    def remove_class(self, index: int) -> None:
        self.prototypes = remove_class_index(self.prototypes, index)

    def state_dict(self) -> Tensors:
        return {f"prototypes/{place}": mean for place, mean in self.prototypes.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.prototypes = {int(name.rpartition("/")[2]): mean for name, mean in tensors.items()}
