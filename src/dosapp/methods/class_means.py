"""Frozen CLIP with a closed-form head on the means of its image features: NCM and GDA.

Nothing trains. A session adds its images' features to the statistics of its classes.
"""

from collections.abc import Mapping

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from dosapp.backbones.base import Expert
from dosapp.functional.named_tensors import select_prefix
from dosapp.heads.base import Head, HeadExpert
from dosapp.heads.class_statistics import ClassStatistics, GaussianHead, NearestMeanHead
from dosapp.methods.base import Batches, Method, Tensors, method_dataclass
from dosapp.scenario import Session
from dosapp.student.selection import Selection
from dosapp.student.student import Student

ENCODE_BATCH_SIZE = 64


@method_dataclass
class NCM(Method):
    """Nearest class mean of frozen image features."""

    summary = "frozen CLIP, nearest mean of each class's image features"
    reference = "Mensink et al., 2013"

    def setup(self, student: Student) -> None:
        self.statistics = ClassStatistics()
        self.answer = HeadExpert(student.backbone, self.make_head(student))

    def make_head(self, student: Student) -> Head:
        """The head that scores the features."""
        return NearestMeanHead(self.statistics, student.backbone.logit_scale.detach())

    def check_session(self, student: Student, session: Session) -> None:
        session.check_images("there is no mean of it")

    def select_parameters(self, student: Student, batches: Batches) -> Selection:
        return Selection()

    def end_training(self, student: Student, session: Session) -> None:
        add_session(self.statistics, student.backbone, student, session)

    def experts(self, student: Student) -> Mapping[str, Expert]:
        return {"head": self.answer}

    def remove_class(self, index: int) -> None:
        self.statistics.remove_class(index)

    def state_dict(self) -> Tensors:
        return {f"statistics/{k}": v for k, v in self.statistics.state_dict().items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.statistics.load_state_dict(select_prefix("statistics/", tensors))


@method_dataclass
class GDA(NCM):
    """Gaussian discriminant analysis of frozen image features, alone or with the captions."""

    summary = "frozen CLIP, Gaussian discriminant analysis of image features"
    reference = "Wang et al., 2024"

    text_weight: NonNegativeFloat = 0.0  # of CLIP's own logits; the paper adds them, weight tuned

    def make_head(self, student: Student) -> Head:
        scale = student.backbone.logit_scale.detach()
        return GaussianHead(self.statistics, self.text_weight * scale)


@torch.no_grad()
def add_session(
    statistics: ClassStatistics, expert: Expert, student: Student, session: Session
) -> None:
    """Add the features of a session's training images, as an expert encodes them."""
    batches = session.train.batches(ENCODE_BATCH_SIZE)
    features = torch.cat([expert.encode_image(pixels) for pixels in batches])
    labels = torch.from_numpy(session.train.labels)
    for label in labels.unique().tolist():
        index = student.classes.index(session.classes[label])
        statistics.add(index, features[labels == label])
