"""Stream-GDA: class Gaussians that follow the features, predict, and label the stream.

Not in the paper (docs/beyond.md). Student and teacher train as in DoSAPP. Gaussian discriminant
analysis on class means that the stream moves (learner/class_head.py) predicts on the teacher's
features f, beside its captions t_c. On the stream its label is the student's target, so that the
captions of old classes are trained to follow the features of these classes:

    labels = argmax_c  f·Σ⁻¹μ_c - ½ μ_cᵀΣ⁻¹μ_c + scale · f·t_c
    loss = CLIP loss of (image, caption of its label)
"""

from typing import Literal

from torch import Tensor

from dosapp.backbones.base import Pixels
from dosapp.methods.base import method_dataclass
from dosapp.methods.dosapp import DoSAPP
from dosapp.student.student import Student


@method_dataclass
class StreamGDA(DoSAPP):
    """DoSAPP, with class statistics that predict and give the pseudo-labels."""

    summary = "DoSAPP; class Gaussians moved by the stream predict and give pseudo-labels"
    reference = "this project, docs/beyond.md"
    abilities = None  # the paper's Table 1 does not have it
    head = "gda-moved"
    head_text_weight = 1.0
    disagreement_is_harm = False  # captions and Gaussians disagree on any stream

    pseudo_labels: Literal["max-logit", "teacher", "student"] = "teacher"

    def teacher_logits(
        self, student: Student, pixels: Pixels, images: Tensor, texts: Tensor
    ) -> Tensor:
        return student.score_with_head(pixels, images, texts)
