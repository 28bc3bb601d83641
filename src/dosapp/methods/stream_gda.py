"""Stream-GDA: class Gaussians that follow the features, and teach the student on the stream.

Not in the paper (docs/beyond.md). All weights train, as in FLYP. Gaussian discriminant
analysis on class means that the stream moves (learner/class_head.py) predicts, beside the captions.
On the stream its label is the student's target, so what is known of the old classes' features
pulls their captions along:

    labels = argmax_c  f·Σ⁻¹μ_c - ½ μ_cᵀΣ⁻¹μ_c + scale · f·t_c
    loss = CLIP loss of (image, caption of its label)
"""

from torch import Tensor

from dosapp.methods.base import method_dataclass
from dosapp.methods.self_training import SelfTraining
from dosapp.student.student import Student


@method_dataclass
class StreamGDA(SelfTraining):
    """Fine-tuning and self-training, with class statistics that predict and label."""

    summary = "fine-tune; class Gaussians moved by the stream predict and give pseudo-labels"
    reference = "this project, docs/beyond.md"
    phase = "both"
    head = "gda-moved"
    head_text_weight = 1.0

    def label_images(self, student: Student, images: Tensor, texts: Tensor) -> Tensor:
        return student.score_with_head(images, texts).argmax(dim=1)
