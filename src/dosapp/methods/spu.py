"""SPU: train only the weights of the first MLP layers with the largest gradient."""

from itertools import islice
from typing import Literal

from torch import Tensor

from dosapp.functional.masks import Scope, top_fraction
from dosapp.methods.base import Batch, Batches, Fraction, Method, method_dataclass
from dosapp.student.student import Student
from dosapp.student.trainable_weights import Selection

ExtraWeights = Literal["nothing", "biases and projection"]


@method_dataclass
class SPU(Method):
    """Selective parameter update.

    Example:
        >>> SPU(sparsity=0.3).key_hyperparameters()["weights"]  # its name in version 0.1
        'first_mlp'
    """

    summary = "update the 10 % of the first MLP layers with the largest gradient"
    reference = "Zhang et al., 2024"
    old_names = {
        "candidates": "weights",
        "score_on_quarter": "quarter",
        "extra_weights": "beside",
    }

    sparsity: Fraction = 0.1  # the paper's c: the share of the candidates that trains
    candidates: Literal["first_mlp", "all"] = "first_mlp"  # all: every weight, without a mask
    scope: Scope = "tensor"  # rank within each tensor or over all of them
    output_norm: bool = False  # score by ‖logits‖², as the released code, not by the CLIP loss
    score_on_quarter: bool = False  # score on 25 % of the batches, the released code's minimum
    extra_weights: ExtraWeights = "nothing"  # trained without a mask: docs/paper-notes.md#spu

    def select_parameters(self, student: Student, batches: Batches) -> Selection:
        """Score the candidates on the session's batches (Eq. 1) and keep the top fraction."""
        if self.candidates == "all":
            return Selection(tuple(student.backbone.own_weights()))
        count = -(-len(batches) // 4) if self.score_on_quarter else len(batches)
        losses = (self.scoring_loss(student, batch) for batch in islice(batches, count))
        scores = student.gradient_scores(student.backbone.first_mlp_weights(), losses)
        mask = top_fraction(scores, self.sparsity, self.scope)
        extra = student.backbone.spu_extra_weights() if self.extra_weights != "nothing" else ()
        return Selection((*scores, *extra), mask, scores)

    def scoring_loss(self, student: Student, batch: Batch) -> Tensor:
        """The loss whose gradient ranks the weights."""
        if not self.output_norm:
            return student.clip_loss(batch.pixels, batch.labels)
        images, texts = student.encode_pairs(batch.pixels, batch.labels)
        return (student.backbone.logit_scale * images @ texts.T).square().sum(dim=1).mean()


@method_dataclass
class ReleasedSPU(SPU):
    """SPU with the settings of its released code."""

    summary = "SPU as released: also all biases and the projection, scored by output norm"

    output_norm: bool = True
    score_on_quarter: bool = True
    extra_weights: ExtraWeights = "biases and projection"
