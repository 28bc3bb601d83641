"""DoSAPP: double smoothing via affine projected parameters (Algorithm 1 of the paper).

A student learns a sparse set of weights; a teacher follows it with two momenta, one for the weights
that move and a slower one for those that do not. With labels, the student learns the task. Without,
it learns from whichever of the two is surer of each image. After another learner
(`FLYP().then(DoSAPP())`) the teacher follows that learner's weights instead; if those are masked,
the union of what each session chose at its beginning is cut back to DoSAPP's own sparsity.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

import torch
from pydantic import Field
from torch import Tensor

from dosapp.backbones.base import Backbone
from dosapp.functional.losses import clip_loss
from dosapp.functional.masks import Combine, Scores, merge_scores, top_fraction
from dosapp.functional.named_tensors import select_prefix
from dosapp.functional.pseudo_labels import LABELLERS
from dosapp.methods.base import (
    Ability,
    AdaptResult,
    Batches,
    Method,
    Tensors,
    UnitInterval,
    method_dataclass,
)
from dosapp.methods.spu import SPU
from dosapp.scenario import Session
from dosapp.student.selection import Selection
from dosapp.student.student import Student


@method_dataclass
class Smoothing:
    """How the teacher follows: γ < λ < δ in the paper, all three equal for a single momentum."""

    gamma: UnitInterval = 0.8  # weights that move, with labels
    lam: UnitInterval = 0.9  # weights that move, without labels
    delta: UnitInterval = 0.9999  # weights that stay
    interval: Literal["step", "epoch", "session"] = "step"  # with labels; the stream has steps

    def __post_init__(self) -> None:
        if not self.gamma < self.lam < self.delta and len({self.gamma, self.lam, self.delta}) > 1:
            warnings.warn(
                f"momenta γ={self.gamma:g}, λ={self.lam:g}, δ={self.delta:g} are not γ < λ < δ, "
                "as DoSAPP wants; fine for an ablation",
                stacklevel=3,
            )


@method_dataclass
class DoSAPP(Method):
    summary = "a sparse student, a teacher with two momenta, labels from the surer of the two"
    reference = "Singh, Aljundi, Belilovsky, 2026"
    phase = "both"
    abilities = frozenset(get_args(Ability))

    learner: SPU = Field(default_factory=SPU)  # which weights: sparsity, candidates, scope
    smoothing: Smoothing = Field(default_factory=Smoothing)  # how the teacher follows
    stream_mask: Literal["union", "current"] = "union"  # which mask in the stream
    combine: Combine = "max"  # how scores of several tasks rank the union
    labels: Literal["surer", "teacher", "student"] = "surer"  # who labels

    def setup(self, student: Student) -> None:  # line 1: θ^T ← θ^S
        self.teacher: Backbone = student.shared_copy()
        self.best: Scores = {}

    # Phase 1, with labels

    def select_parameters(self, student: Student, lessons: Batches) -> Selection:  # line 3
        return self.learner.select_parameters(student, lessons)

    def begin_session(self, student: Student, session: Session) -> None:
        chosen = student.selection
        if chosen.mask is not None and chosen.scores is not None:
            self.best = merge_scores(self.best, chosen.scores, chosen.mask, self.combine)

    def after_step(self, student: Student) -> None:  # line 6
        if self.smoothing.interval == "step":
            self._follow(student, self.smoothing.gamma)

    def begin_epoch(self, student: Student, epoch: int, lessons: Batches) -> None:
        if self.smoothing.interval == "epoch" and epoch > 0:
            self._follow(student, self.smoothing.gamma)

    def end_session(self, student: Student, session: Session) -> None:
        if student.weights_assigned:  # the learner has put other weights in place (ZSCL's average)
            student.sync_copy(self.teacher)
        elif self.smoothing.interval in ("epoch", "session"):
            self._follow(student, self.smoothing.gamma)

    # Phase 2, without: each image is seen once

    def begin_stream(self, student: Student) -> None:  # lines 8 and 9
        chosen = student.session_selection
        if self.stream_mask == "union" and self.best:
            mask = top_fraction(self.best, self.learner.sparsity, self.learner.scope)
            chosen = replace(chosen, mask={**(chosen.mask or {}), **mask}, scores=None)
        student.set_trainable(chosen)

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:  # lines 11 to 18
        seen, words = student.encode_shared_trunk(pixels, self.teacher)
        images, texts = student.backbone.encode_image(seen), student.backbone.encode_text(words)
        with torch.inference_mode():
            teacher = self.teacher.encode_image(seen) @ self.teacher.encode_text(words).T
            own = images @ texts.T
            labels = LABELLERS[self.labels](teacher, own)
            differ = (teacher.argmax(dim=1) != own.argmax(dim=1)).float().mean().item()
        labels = labels.clone()  # out of inference mode
        return AdaptResult(
            labels, clip_loss(images, texts[labels], student.backbone.logit_scale), differ
        )

    def after_stream_step(self, student: Student) -> None:  # line 19
        self._follow(student, self.smoothing.lam)

    def _follow(self, student: Student, active: float) -> None:  # Eq. 3, 4 and 6
        student.ema_update(self.teacher, active=active, frozen=self.smoothing.delta)

    # Answering and saving

    def shared_copies(self) -> Mapping[str, Backbone]:
        return {"teacher": self.teacher}

    def experts(self, student: Student) -> Mapping[str, Backbone]:
        return {"teacher": self.teacher, "student": student.backbone}

    def state_dict(self) -> Tensors:
        return {f"best/{name}": score for name, score in self.best.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.best = select_prefix("best/", tensors)
