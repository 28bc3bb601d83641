"""Learn only the weights of the first MLP layers whose gradient is largest."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from dosapp.core.masks import Scope, top_fraction
from dosapp.methods.base import Batch, Method, settings
from dosapp.student import Selection, Student

Share = Annotated[float, Field(gt=0, le=1, description="share of the candidates that moves, c")]


@settings
class SPU(Method):
    idea = "update the 10 % of the first MLP layers with the largest gradient"
    reference = "Zhang et al., 2024"

    sparsity: Share = 0.1
    weights: Literal["first_mlp", "all"] = "first_mlp"
    scope: Scope = "tensor"
    beside: Literal["nothing", "biases and projection"] = "nothing"  # docs/paper-notes.md#spu

    def choose(self, student: Student, lessons: Iterable[Batch]) -> Selection:
        if self.weights == "all":
            return Selection(tuple(student.net.weights()))
        losses = (self.loss(student, batch) for batch in lessons)
        scores = student.scores(student.net.first_mlp(), losses)
        mask = top_fraction(scores, self.sparsity, self.scope)
        whole = tuple(student.net.beside_first_mlp()) if self.beside != "nothing" else ()
        return Selection((*scores, *whole), mask, scores)
