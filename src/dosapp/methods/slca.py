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

from dosapp.methods.base import Batch, Lessons, Method, Review, Tensors, settings
from dosapp.methods.class_gaussians import Gaussians
from dosapp.scenario import Session
from dosapp.student.student import Selection, Student


@settings
class SLCA(Method):
    idea = "a slow network and a fast classifier, aligned on remembered class statistics"
    reference = "Zhang et al., 2023"

    fast: PositiveFloat = 5.0  # the projections' rate, times the network's
    passes: NonNegativeInt = 3  # of the alignment, over all classes
    samples: PositiveInt = 256  # features per step of it
    temperature: PositiveFloat = 0.1  # of its logits, whose norm is taken out first

    def start(self, student: Student) -> None:
        self.classes = Gaussians()
        self.sessions = 0

    def check(self, student: Student, session: Session) -> None:
        session.taught("slca has no statistics of it")

    def choose(self, student: Student, lessons: Lessons) -> Selection:
        rates = dict.fromkeys(student.net.projections(), self.fast)
        return Selection(tuple(student.net.towers()), rates=rates)

    def begin_session(self, student: Student, session: Session) -> None:
        self.sessions += 1

    def end_lessons(self, student: Student, session: Session) -> None:
        """Mean and covariance of each class's features before the projection `[n, W]`."""
        with torch.no_grad():
            features = torch.cat([student.net.pool_image(x) for x in session.train.batches(64)])
        labels = torch.from_numpy(session.train.labels)
        for label in labels.unique().tolist():
            place = student.classes.index(session.classes[label])
            self.classes.learn(place, features[labels == label], self.sessions)

    def reviews(self, student: Student, per_epoch: int) -> Sequence[Review]:
        if self.sessions < 2:
            return ()
        names = tuple(student.net.projections())
        rates = dict.fromkeys(names, self.fast)
        steps = self.passes * len(student.classes)
        return [Review(steps, Selection(names, rates=rates), self.aligned)]

    def aligned(self, student: Student, batch: Callable[[], Batch], step: int) -> Tensor:
        """Tell drawn features of all classes apart; no picture is looked at."""
        drawn, labels = self.classes.draw(
            self.samples, self.sessions, student.rng("alignment", step)
        )
        logits = student.net.project_image(drawn) @ student.captions().T  # cosines [N, C]
        groups = self.classes.sessions()  # [C]
        norms = [logits[:, groups == s].norm(dim=1) for s in groups.unique()]
        scale = torch.stack(norms).mean(dim=0)[:, None]
        return cross_entropy(logits / scale.clamp(min=1e-6) / self.temperature, labels)

    def forget(self, place: int) -> None:
        self.classes.forget(place)

    def tensors(self) -> Tensors:
        return {"sessions": torch.tensor(self.sessions), **self.classes.state()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.sessions = int(tensors["sessions"])
        self.classes = Gaussians.of(tensors)
