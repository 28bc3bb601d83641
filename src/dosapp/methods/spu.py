"""Learn only the weights of the first MLP layers whose gradient is largest."""

from itertools import islice
from typing import Literal

from torch import Tensor

from dosapp.functional.masks import Scope, top_fraction
from dosapp.methods.base import Batch, Lessons, Method, Portion, settings
from dosapp.student.student import Selection, Student

Beside = Literal["nothing", "biases and projection"]


@settings
class SPU(Method):
    idea = "update the 10 % of the first MLP layers with the largest gradient"
    reference = "Zhang et al., 2024"

    sparsity: Portion = 0.1
    weights: Literal["first_mlp", "all"] = "first_mlp"
    scope: Scope = "tensor"
    output_norm: bool = False  # score by ‖logits‖², as the released code, not by the CLIP loss
    quarter: bool = False  # score on a quarter of the lessons, the least the released code takes
    beside: Beside = "nothing"  # docs/paper-notes.md#spu

    def choose(self, student: Student, lessons: Lessons) -> Selection:
        if self.weights == "all":
            return Selection(tuple(student.net.towers()))
        count = -(-len(lessons) // 4) if self.quarter else len(lessons)
        losses = (self.score(student, batch) for batch in islice(lessons, count))
        scores = student.scores(student.net.first_mlp(), losses)
        mask = top_fraction(scores, self.sparsity, self.scope)
        whole = tuple(student.net.beside_first_mlp()) if self.beside != "nothing" else ()
        return Selection((*scores, *whole), mask, scores)

    def score(self, student: Student, batch: Batch) -> Tensor:
        """The loss whose gradient ranks the weights."""
        if not self.output_norm:
            return student.clip_loss(batch.pixels, batch.labels)
        images, texts = student.pairs(batch.pixels, batch.labels)
        return (student.net.scale * images @ texts.T).square().sum(dim=1).mean()


@settings
class ReleasedSPU(SPU):
    idea = "SPU as its code was released: biases and projection whole, scored by output norm"

    output_norm: bool = True
    quarter: bool = True
    beside: Beside = "biases and projection"
