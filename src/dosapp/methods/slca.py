"""SLCA: a slow network, a fast classifier, and a classifier aligned with all classes afterwards.

CLIP's classifier is its two projections. After each session but the first they learn again, from
features drawn from a Gaussian per class instead of from pictures: means and covariances are stored,
pictures are not.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import cross_entropy

from dosapp.methods.base import Batch, Batches, Method, Tensors, TrainingStage, method_dataclass
from dosapp.methods.class_gaussians import Gaussians
from dosapp.scenario import Session
from dosapp.student.selection import Selection
from dosapp.student.student import Student


@method_dataclass
class SLCA(Method):
    summary = "a slow network and a fast classifier, aligned on remembered class statistics"
    reference = "Zhang et al., 2023"

    fast: PositiveFloat = 5.0  # the projections' rate, times the network's
    passes: NonNegativeInt = 3  # of the alignment, over all classes
    samples: PositiveInt = 256  # features per step of it
    temperature: PositiveFloat = 0.1  # of its logits, whose norm is taken out first

    def setup(self, student: Student) -> None:
        self.classes = Gaussians()
        self.sessions = 0

    def check_session(self, student: Student, session: Session) -> None:
        session.check_images("slca has no statistics of it")

    def select_parameters(self, student: Student, lessons: Batches) -> Selection:
        rates = dict.fromkeys(student.backbone.projection_weights(), self.fast)
        return Selection(tuple(student.backbone.tower_weights()), lr_scales=rates)

    def begin_session(self, student: Student, session: Session) -> None:
        self.sessions += 1

    def end_training(self, student: Student, session: Session) -> None:
        """Mean and covariance of each class's features before the projection `[n, W]`."""
        with torch.no_grad():
            features = torch.cat(
                [student.backbone.pool_image(x) for x in session.train.batches(64)]
            )
        labels = torch.from_numpy(session.train.labels)
        for label in labels.unique().tolist():
            place = student.classes.index(session.classes[label])
            self.classes.learn(place, features[labels == label], self.sessions)

    def extra_stages(self, student: Student, per_epoch: int) -> Sequence[TrainingStage]:
        if self.sessions < 2:
            return ()
        names = tuple(student.backbone.projection_weights())
        rates = dict.fromkeys(names, self.fast)
        steps = self.passes * len(student.classes)
        return [TrainingStage(steps, Selection(names, lr_scales=rates), self.aligned)]

    def aligned(self, student: Student, batch: Callable[[], Batch], step: int) -> Tensor:
        """Tell drawn features of all classes apart; no picture is looked at."""
        drawn, labels = self.classes.draw(
            self.samples, self.sessions, student.rng("alignment", step)
        )
        logits = (
            student.backbone.project_image(drawn) @ student.encode_captions().T
        )  # cosines [N, C]
        groups = self.classes.sessions()  # [C]
        norms = [logits[:, groups == s].norm(dim=1) for s in groups.unique()]
        scale = torch.stack(norms).mean(dim=0)[:, None]
        return cross_entropy(logits / scale.clamp(min=1e-6) / self.temperature, labels)

    def remove_class(self, index: int) -> None:
        self.classes.remove_class(index)

    def state_dict(self) -> Tensors:
        return {"sessions": torch.tensor(self.sessions), **self.classes.state()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.sessions = int(tensors["sessions"])
        self.classes = Gaussians.of(tensors)
