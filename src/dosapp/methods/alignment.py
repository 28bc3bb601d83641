"""SLCA's classifier alignment, as a stage that any labelled method can have (`--align`).

CLIP's classifier is its two projections. After each session but the first, they alone train on
features sampled from a Gaussian of each class. Means and covariances are stored, images are not.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import cross_entropy

from dosapp.methods.base import Batch, Tensors, TrainingStage, method_dataclass
from dosapp.methods.slca_gaussians import ClassGaussians
from dosapp.methods.staged import Stage
from dosapp.scenario import Session
from dosapp.student.student import Student
from dosapp.student.trainable_weights import Selection


@method_dataclass
class ClassifierAlignment(Stage):
    """Train the projections on stored class statistics (CA)."""

    summary = "align the projections on stored class statistics after each session"
    reference = "Zhang et al., 2023"
    role = "alignment"
    title: ClassVar[str] = "alignment"  # in messages

    classifier_lr_scale: PositiveFloat = 5.0  # learning rate of the projections, times the towers'
    ca_epochs: NonNegativeInt = 3  # of as many steps as there are classes
    samples_per_step: PositiveInt = 256  # features per step of the alignment
    ca_temperature: PositiveFloat = 0.1  # of the normalised logits

    def setup(self, student: Student) -> None:
        self.gaussians = ClassGaussians()
        self.sessions = 0

    def check_session(self, student: Student, session: Session) -> None:
        session.check_images(f"{self.title} has no statistics of it")

    def lr_scales(self, student: Student) -> dict[str, float]:
        """The projections' factors on the learning rate."""
        return dict.fromkeys(student.backbone.projection_weights(), self.classifier_lr_scale)

    def begin_session(self, student: Student, session: Session) -> None:
        self.sessions += 1

    def end_training(self, student: Student, session: Session) -> None:
        """Fit the Gaussian of each class to its features before the projection `[n, W]`."""
        with torch.no_grad():
            batches = [student.backbone.pool_image(x) for x in session.train.batches(64)]
        features, labels = torch.cat(batches), torch.from_numpy(session.train.labels)
        for label in labels.unique().tolist():
            index = student.classes.index(session.classes[label])
            self.gaussians.fit(index, features[labels == label], self.sessions)

    def extra_stages(self, student: Student, steps_per_epoch: int) -> Sequence[TrainingStage]:
        if self.sessions < 2:
            return ()
        lr_scales = self.lr_scales(student)
        selection = Selection(tuple(lr_scales), lr_scales=lr_scales)
        steps = self.ca_epochs * len(student.classes)
        return [TrainingStage(steps, selection, self.alignment_loss)]

    def alignment_loss(self, student: Student, batch: Callable[[], Batch], step: int) -> Tensor:
        """Cross-entropy of sampled features over all classes; no image is read.

        Logits are divided by the mean, over sessions, of the norm of that session's logits.
        """
        generator = student.rng("alignment", step)
        features, labels = self.gaussians.sample(self.samples_per_step, self.sessions, generator)
        logits = student.backbone.project_image(features) @ student.encode_captions().T  # [N, C]
        sessions = self.gaussians.sessions()  # [C]
        norms = [logits[:, sessions == s].norm(dim=1) for s in sessions.unique()]
        norm = torch.stack(norms).mean(dim=0)[:, None]
        return cross_entropy(logits / norm.clamp(min=1e-6) / self.ca_temperature, labels)

    def remove_class(self, index: int) -> None:
        self.gaussians.remove_class(index)

    def state_dict(self) -> Tensors:
        return {"sessions": torch.tensor(self.sessions), **self.gaussians.state_dict()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.sessions = int(tensors["sessions"])
        self.gaussians = ClassGaussians.from_state_dict(tensors)
