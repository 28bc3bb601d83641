"""Learn only the weights of the first MLP layers whose gradient is largest."""

from itertools import islice
from typing import Literal

from torch import Tensor

from dosapp.functional.masks import Scope, top_fraction
from dosapp.methods.base import Batch, Batches, Fraction, Method, method_dataclass
from dosapp.student.selection import Selection
from dosapp.student.student import Student

Beside = Literal["nothing", "biases and projection"]


@method_dataclass
class SPU(Method):
    summary = "update the 10 % of the first MLP layers with the largest gradient"
    reference = "Zhang et al., 2024"

    sparsity: Fraction = 0.1
    weights: Literal["first_mlp", "all"] = "first_mlp"
    scope: Scope = "tensor"
    output_norm: bool = False  # score by ‖logits‖², as the released code, not by the CLIP loss
    quarter: bool = False  # score on a quarter of the lessons, the least the released code takes
    beside: Beside = "nothing"  # docs/paper-notes.md#spu

    def select_parameters(self, student: Student, lessons: Batches) -> Selection:
        if self.weights == "all":
            return Selection(tuple(student.backbone.tower_weights()))
        count = -(-len(lessons) // 4) if self.quarter else len(lessons)
        losses = (self.score(student, batch) for batch in islice(lessons, count))
        scores = student.score_weights(student.backbone.first_mlp_weights(), losses)
        mask = top_fraction(scores, self.sparsity, self.scope)
        whole = tuple(student.backbone.spu_extra_weights()) if self.beside != "nothing" else ()
        return Selection((*scores, *whole), mask, scores)

    def score(self, student: Student, batch: Batch) -> Tensor:
        """The loss whose gradient ranks the weights."""
        if not self.output_norm:
            return student.clip_loss(batch.pixels, batch.labels)
        images, texts = student.encode_pairs(batch.pixels, batch.labels)
        return (student.backbone.logit_scale * images @ texts.T).square().sum(dim=1).mean()


@method_dataclass
class ReleasedSPU(SPU):
    summary = "SPU as its code was released: biases and projection whole, scored by output norm"

    output_norm: bool = True
    quarter: bool = True
    beside: Beside = "biases and projection"
