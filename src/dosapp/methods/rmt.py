"""RMT: a robust mean teacher with symmetric cross-entropy and a contrastive loss.

Source-free: prototypes are the mean features of each class at the end of its session, and no images
are replayed. The projector of the contrastive loss trains on the stream with the other weights.
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

BATCH_SIZE = 64  # images per forward pass for the prototypes
PROJECTION_DIM = 128


class Projector(BackboneWrapper):
    """Features D → 128 → ReLU → 128, for the contrastive loss only."""

    def __init__(self, inner: Backbone, seed: int) -> None:
        generator, dim, out = torch_rng("projector", seed), inner.embed_dim, PROJECTION_DIM
        added = {
            "rmt.first": torch.randn(dim, out, generator=generator) / dim**0.5,
            "rmt.second": torch.randn(out, out, generator=generator) / out**0.5,
        }
        super().__init__(inner, added)

    def __call__(self, features: Tensor) -> Tensor:
        hidden = (features @ self.added["rmt.first"]).relu()
        return normalize(hidden @ self.added["rmt.second"], dim=-1)


@method_dataclass
class RMT(MeanTeacher):
    """λ_ce · symmetric cross-entropy to the teacher + λ_cont · contrastive loss."""

    summary = "symmetric cross-entropy to a mean teacher, contrastive loss to class prototypes"
    reference = "Döbler et al., 2023"
    abilities = frozenset({"corrupted data"})
    old_names = {"lambda_ce_trg": "agree", "lambda_cont": "contrast"}

    lambda_ce_trg: NonNegativeFloat = 1.0  # of the symmetric cross-entropy
    lambda_cont: NonNegativeFloat = 1.0  # of the contrastive loss
    temperature: PositiveFloat = 0.1

    def wrap_backbone(self, backbone: Backbone, seed: int) -> Backbone:
        return Projector(backbone, seed)

    def setup(self, student: Student) -> None:
        super().setup(student)
        self.prototypes: dict[int, Tensor] = {}  # by class index

    def check_session(self, student: Student, session: Session) -> None:
        if self.lambda_cont:
            session.check_images("rmt has no prototype of it")

    def end_session(self, student: Student, session: Session) -> None:
        """Compute the mean unit feature of each class of the session."""
        with torch.no_grad():
            batches = [student.backbone.encode_image(x) for x in session.train.batches(BATCH_SIZE)]
        features, labels = torch.cat(batches), torch.from_numpy(session.train.labels)
        for label in labels.unique().tolist():
            index = student.classes.index(session.classes[label])
            self.prototypes[index] = features[labels == label].mean(dim=0)

    def begin_stream(self, student: Student) -> None:
        super().begin_stream(student)
        selection = student.session_selection
        if selection.names and self.lambda_cont:
            projector = tuple(find_wrapper(student.backbone, Projector).added)
            student.set_trainable(replace(selection, names=(*selection.names, *projector)))

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        backbone = student.backbone
        texts, scale = student.encode_captions(), backbone.logit_scale.detach()
        features = backbone.encode_image(pixels)
        augmented = backbone.encode_image(augment(pixels, student.rng("rmt")))
        logits, augmented_logits = scale * features @ texts.T, scale * augmented @ texts.T
        teacher_logits = self.teacher_logits(student, pixels)
        cross_entropies = (
            symmetric_cross_entropy(logits, teacher_logits)
            + symmetric_cross_entropy(augmented_logits, teacher_logits)
        ) / 2
        loss = self.lambda_ce_trg * cross_entropies.mean()
        if self.lambda_cont:
            prototypes = torch.stack(list(self.prototypes.values()))
            cosines = normalize(features.detach(), dim=1) @ normalize(prototypes).T
            nearest = prototypes[cosines.argmax(dim=1)]
            project = find_wrapper(backbone, Projector)
            views = project(torch.stack([nearest, features, augmented]))
            loss = loss + self.lambda_cont * supervised_contrastive_loss(views, self.temperature)
        return self.make_result(logits, teacher_logits, loss)

    def remove_class(self, index: int) -> None:
        self.prototypes = remove_class_index(self.prototypes, index)

    def state_dict(self) -> Tensors:
        return {f"prototypes/{index}": mean for index, mean in self.prototypes.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.prototypes = {int(name.rpartition("/")[2]): mean for name, mean in tensors.items()}
