"""ZSCL: keep the original CLIP's answers on reference pictures, and average the weights on the way.

References are pictures with captions that belong to no task (`--set references=…`): a generated
set or one from the hub by name, or the path of a folder, a tar or a CSV (`--data-dir` is for what
is taught). A caption is the training caption of the picture's class.
"""

from collections.abc import Mapping

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from dosapp.backbones.base import Backbone
from dosapp.data.base import Dataset, ImageArray
from dosapp.data.preprocess import Preprocess
from dosapp.data.registry import SYNTHETIC, load_dataset
from dosapp.errors import InputError
from dosapp.functional.losses import soft_cross_entropy
from dosapp.methods.base import Batch, Method, Tensors, method_dataclass
from dosapp.scenario import Session
from dosapp.student.student import Student


@method_dataclass
class ZSCL(Method):
    summary = "keep the original model's answers on reference pictures; average the weights"
    reference = "Zheng et al., 2023"

    references: str = ""  # a dataset's name, a folder, or a CSV
    weight: NonNegativeFloat = 1.0  # of each direction of the distillation
    temperature: PositiveFloat = 2.0
    look: PositiveInt = 64  # reference pictures per step
    every: NonNegativeInt = 10  # steps between samples of the average; 0: no average

    def setup(self, student: Student) -> None:
        self._check_given()
        self.found: Dataset[ImageArray] | None = (
            None  # opened for lessons; answering needs no references
        )
        self.original: Backbone = student.shared_copy()
        self.average: Backbone = student.shared_copy()
        self.samples = 1

    def _check_given(self) -> None:
        if not self.references:
            raise InputError(
                "zscl needs reference pictures with captions: --set references=signs, or the path "
                "of a folder of class folders or of a CSV"
            )

    def check_session(self, student: Student, session: Session) -> None:
        self.looked_up(student.backbone.preprocess)

    def looked_up(self, preprocess: Preprocess) -> Dataset[ImageArray]:
        if self.found is None:
            self.found = load_dataset(self.references, preprocess)
        return self.found

    def external_images(self, preprocess: Preprocess) -> list[str]:
        """Every reference by its place, bytes and class; a set that is drawn is its name."""
        self._check_given()
        if self.references in SYNTHETIC:
            return []
        found = load_dataset(self.references, preprocess)
        keys = (found.train.images.key(row) for row in range(len(found.train.labels)))
        names = (found.prompts.caption(found.classes[n]) for n in found.train.labels)
        return [f"{key} {name}" for key, name in zip(keys, names, strict=True)]

    def begin_session(self, student: Student, session: Session) -> None:
        student.sync_copy(self.average)
        self.samples = 1  # where the session begins is the first

    def loss(self, student: Student, batch: Batch) -> Tensor:
        return super().loss(student, batch) + self.weight * self.strayed(student)

    def strayed(self, student: Student) -> Tensor:
        """Cross-entropy to the original's answers, per picture and per caption, times T².

        Captions are read by the original model on both sides.
        """
        found = self.looked_up(student.backbone.preprocess)
        labels = found.train.labels
        rows = torch.randperm(len(labels), generator=student.rng("references"))[: self.look]
        pixels = found.train.images.read(rows.numpy()).float() / 255
        names = (found.classes[labels[row]] for row in rows.tolist())
        captions = [found.prompts.caption(name) for name in names]
        scale, T = student.backbone.logit_scale, self.temperature
        with torch.no_grad():
            texts = self.original.encode_text(captions)
            old = scale * self.original.encode_image(pixels) @ texts.T / T
        new = scale * student.backbone.encode_image(pixels) @ texts.T / T
        images = soft_cross_entropy(new, old.softmax(dim=1)).mean()
        captioned = soft_cross_entropy(new.T, old.T.softmax(dim=1)).mean()
        return (images + captioned) * T**2

    def after_step(self, student: Student) -> None:
        """w̄ ← (w̄ n + w) / (n + 1)."""
        if self.every and student.steps % self.every == 0:
            share = self.samples / (self.samples + 1)
            student.ema_update(self.average, active=share, frozen=share)
            self.samples += 1

    def end_training(self, student: Student, session: Session) -> None:
        if self.every:  # the average is the model from here on
            averaged = self.average.weights()
            student.assign({n: averaged[n] for n in student.selection.names})

    def shared_copies(self) -> Mapping[str, Backbone]:
        return {"original": self.original, "average": self.average}

    def state_dict(self) -> Tensors:
        return {"samples": torch.tensor(self.samples)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.samples = int(tensors["samples"])
