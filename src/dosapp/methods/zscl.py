"""ZSCL: distil the pretrained CLIP on reference images, and average the weights over steps.

Reference images have captions and belong to no task. `ref_dataset` names a generated set or one of
the hub, or is the path of a folder, a tar or a CSV. The caption of an image is the training caption
of its class.
"""

from collections.abc import Mapping

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from dosapp.backbones.base import Backbone
from dosapp.data.base import Dataset, ImageArray
from dosapp.data.preprocess import Preprocess, to_float
from dosapp.data.registry import SYNTHETIC, load_dataset
from dosapp.errors import InputError
from dosapp.functional.losses import soft_cross_entropy
from dosapp.methods.base import Batch, Method, Tensors, method_dataclass
from dosapp.scenario import Session
from dosapp.student.student import Student


@method_dataclass
class ZSCL(Method):
    """Zero-shot continual learning: L_CLIP + weight · (L_image + L_text), and weight ensembling."""

    summary = "distil the pretrained model on reference images; average the weights"
    reference = "Zheng et al., 2023"
    old_names = {
        "ref_dataset": "references",
        "distillation_weight": "weight",
        "ref_batch_size": "look",
        "avg_freq": "every",
    }

    ref_dataset: str = ""  # name of a dataset, or the path of a folder, a tar or a CSV
    distillation_weight: NonNegativeFloat = 1.0  # of the sum of L_image and L_text
    temperature: PositiveFloat = 2.0
    ref_batch_size: PositiveInt = 64  # reference images per step
    avg_freq: NonNegativeInt = 10  # steps between samples of the weight average; 0: no average

    def setup(self, student: Student) -> None:
        self._check_ref_dataset()
        self.references: Dataset[ImageArray] | None = None  # loaded for training, not to predict
        self.original: Backbone = student.shared_copy()
        self.average: Backbone = student.shared_copy()
        self.samples = 1  # in the average

    def _check_ref_dataset(self) -> None:
        if not self.ref_dataset:
            raise InputError(
                "zscl needs reference images with captions: --set ref_dataset=signs, or the path "
                "of a folder of class folders or of a CSV"
            )

    def check_session(self, student: Student, session: Session) -> None:
        self.load_references(student.backbone.preprocess)

    def load_references(self, preprocess: Preprocess) -> Dataset[ImageArray]:
        """Load the reference images on first use."""
        if self.references is None:
            self.references = load_dataset(self.ref_dataset, preprocess)
        return self.references

    def external_images(self, preprocess: Preprocess) -> list[str]:
        """Key and caption of each reference image; none for a generated set."""
        self._check_ref_dataset()
        if self.ref_dataset in SYNTHETIC:
            return []
        dataset = load_dataset(self.ref_dataset, preprocess)
        keys = (dataset.train.images.key(row) for row in range(len(dataset.train.labels)))
        captions = (dataset.prompts.caption(dataset.classes[n]) for n in dataset.train.labels)
        return [f"{key} {caption}" for key, caption in zip(keys, captions, strict=True)]

    def begin_session(self, student: Student, session: Session) -> None:
        student.sync_copy(self.average)
        self.samples = 1  # the weights at the start of the session

    def loss(self, student: Student, batch: Batch) -> Tensor:
        loss = super().loss(student, batch)
        return loss + self.distillation_weight * self.distillation(student)

    def distillation(self, student: Student) -> Tensor:
        """L_image + L_text on reference images, times T².

        Cross-entropy to the original model's logits, over captions and over images. The original
        model encodes the captions of both.
        """
        dataset = self.load_references(student.backbone.preprocess)
        labels = dataset.train.labels
        order = torch.randperm(len(labels), generator=student.rng("references"))
        rows = order[: self.ref_batch_size]
        pixels = to_float(dataset.train.images.read(rows.numpy()))
        classes = (dataset.classes[labels[row]] for row in rows.tolist())
        captions = [dataset.prompts.caption(name) for name in classes]
        scale, T = student.backbone.logit_scale, self.temperature
        with torch.no_grad():
            texts = self.original.encode_text(captions)
            old_logits = scale * self.original.encode_image(pixels) @ texts.T / T
        logits = scale * student.backbone.encode_image(pixels) @ texts.T / T
        image_loss = soft_cross_entropy(logits, old_logits.softmax(dim=1)).mean()
        text_loss = soft_cross_entropy(logits.T, old_logits.T.softmax(dim=1)).mean()
        return (image_loss + text_loss) * T**2

    def after_step(self, student: Student) -> None:
        """θ̄ ← (n θ̄ + θ) / (n + 1)."""
        if self.avg_freq and student.steps % self.avg_freq == 0:
            share = self.samples / (self.samples + 1)
            student.ema_update(self.average, active_momentum=share, frozen_momentum=share)
            self.samples += 1

    def end_training(self, student: Student, session: Session) -> None:
        if self.avg_freq:  # the average becomes the model
            averaged = self.average.weights()
            student.assign({n: averaged[n] for n in student.selection.names})

    def shared_copies(self) -> Mapping[str, Backbone]:
        return {"original": self.original, "average": self.average}

    def state_dict(self) -> Tensors:
        return {"samples": torch.tensor(self.samples)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.samples = int(tensors["samples"])
