"""DoSAPP: Double Smoothing via Affine Projected Parameters, Algorithm 1 of the paper.

    1  θ^T ← θ^S                                                  setup
    2  for each task t:
    3      θ^m ← top-K of the first MLP layers of θ^S (Eq. 1)     select_parameters
    4      for (x, y) in D^s_t:
    5          θ^m ← θ^m - η ∇L(M_S(x), y)                        loss: CLIP's, as in Method
    6          θ^T ← p θ^T + q θ^S (Eq. 3, 4)                     after_step
    8      m_u ← top-K of m_1 ∪ … ∪ m_t                           begin_session, begin_stream
    9      select m_u in M_S                                      begin_stream
   10      for x in D^u_t:
   11          ŷ ← label of the expert with the larger            stream_loss
   17              maximum logit (Eq. 5)
   18          θ^m_u ← θ^m_u - η ∇L(M_S(x), ŷ)                    stream_loss
   19          θ^T ← p' θ^T + q' θ^S (Eq. 6)                      after_stream_step

The learner takes the steps of lines 5 and 18 with these losses (learner/training.py and
stream_step.py, through `Student.step`). Where the paper is ambiguous, docs/paper-notes.md
says which reading this is. After another method (`FLYP().then(DoSAPP())`) the teacher follows the
weights that method selects, and m_u is cut back to DoSAPP's own sparsity.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal, get_args

import torch
from pydantic import Field
from torch import Tensor

from dosapp.backbones.base import Backbone, Pixels
from dosapp.functional.losses import clip_loss
from dosapp.functional.masks import Merge, Scores, merge_scores, top_fraction
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
from dosapp.student.student import Student
from dosapp.student.trainable_weights import Selection

MANY_CLASSES = 256  # from which on captions without a pseudo-label get no gradient


@method_dataclass
class TeacherEMA:
    """Momenta of the teacher: γ < λ < δ in the paper; all three equal is a single momentum."""

    gamma: UnitInterval = 0.8  # γ: trainable entries, labelled phase
    lam: UnitInterval = 0.9  # λ: trainable entries, unlabelled phase
    delta: UnitInterval = 0.9999  # δ: frozen entries
    interval: Literal["step", "epoch", "session"] = "step"  # labelled phase only

    def __post_init__(self) -> None:
        if not self.gamma < self.lam < self.delta and len({self.gamma, self.lam, self.delta}) > 1:
            warnings.warn(
                f"momenta γ={self.gamma:g}, λ={self.lam:g}, δ={self.delta:g} are not γ < λ < δ as "
                "in the paper; this is meant for ablations",
                stacklevel=3,
            )


@method_dataclass
class DoSAPP(Method):
    """A sparsely trained student and a teacher with two momenta; see the module's Algorithm 1.

    Example:
        >>> DoSAPP().hyperparameters()["ema.gamma"]
        0.8
    """

    summary = "sparse student, dual-momentum teacher, pseudo-labels by the larger maximum logit"
    reference = "Singh, Aljundi, Belilovsky, 2026"
    phase = "both"
    abilities: ClassVar[frozenset[Ability] | None] = frozenset(get_args(Ability))
    old_names = {
        "selection": "learner",
        "ema": "smoothing",
        "merge": "combine",
        "pseudo_labels": "labels",
    }
    old_values = {"pseudo_labels": {"max-logit": "surer"}}

    # SPU's rule (Eq. 1) selects which weights train: sparsity c, candidates, scope.
    selection: SPU = Field(default_factory=SPU)
    ema: TeacherEMA = Field(default_factory=TeacherEMA)
    stream_mask: Literal["union", "current"] = "union"  # m_u, or m_t for the ablations
    merge: Merge = "max"  # how the scores of several tasks combine for m_u
    pseudo_labels: Literal["max-logit", "teacher", "student"] = "max-logit"  # Eq. 5

    def setup(self, student: Student) -> None:  # line 1
        self.teacher: Backbone = student.shared_copy()
        self.union_scores: Scores = {}  # zero outside m_1 ∪ … ∪ m_t

    # Phase 1: with labels

    def select_parameters(self, student: Student, batches: Batches) -> Selection:  # line 3
        return self.selection.select_parameters(student, batches)

    def begin_session(self, student: Student, session: Session) -> None:  # line 8: the union
        current = student.selection
        if current.mask is not None and current.scores is not None:
            self.union_scores = merge_scores(
                self.union_scores, current.scores, current.mask, self.merge
            )

    def after_step(self, student: Student) -> None:  # line 6
        if self.ema.interval == "step":
            self._update_teacher(student, self.ema.gamma)

    def begin_epoch(self, student: Student, epoch: int, batches: Batches) -> None:
        if self.ema.interval == "epoch" and epoch > 0:
            self._update_teacher(student, self.ema.gamma)

    def end_session(self, student: Student, session: Session) -> None:
        if student.weights_assigned:  # the labelled method replaced the weights (ZSCL's average)
            student.sync_copy(self.teacher)
        elif self.ema.interval in ("epoch", "session"):
            self._update_teacher(student, self.ema.gamma)

    # Phase 2: without labels, one pass

    def begin_stream(self, student: Student) -> None:  # lines 8 and 9
        trainable = student.session_selection
        if self.stream_mask == "union" and self.union_scores:
            mask = top_fraction(self.union_scores, self.selection.sparsity, self.selection.scope)
            trainable = replace(trainable, mask={**(trainable.mask or {}), **mask}, scores=None)
        student.set_trainable(trainable)

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:  # lines 11 to 18
        images, captions = student.encode_shared_trunk(pixels, self.teacher)
        image_features = student.backbone.encode_image(images)  # [B, D]
        is_large = len(student.classes) > MANY_CLASSES
        with torch.set_grad_enabled(not is_large):
            text_features = student.backbone.encode_text(captions)  # [C, D], one per class
        with torch.inference_mode():  # logits are cosines [B, C]
            teacher_images = self.teacher.encode_image(images)
            teacher_texts = self.teacher.encode_text(captions)
            teacher_logits = self.teacher_logits(student, images, teacher_images, teacher_texts)
            student_logits = image_features @ text_features.T
            labels = LABELLERS[self.pseudo_labels](teacher_logits, student_logits)  # Eq. 5
            differ = teacher_logits.argmax(dim=1) != student_logits.argmax(dim=1)
            disagreement = differ.float().mean().item()
        labels, teacher_images = labels.clone(), teacher_images.clone()  # normal tensors again
        if is_large:  # a gradient is needed for the captions of the pseudo-labels only
            present, index = labels.unique(return_inverse=True)
            captions = student.text_head.captions(present.tolist())
            pair_features = student.backbone.encode_text(captions)[index]
        else:
            pair_features = text_features[labels]
        scale = student.backbone.logit_scale
        loss = clip_loss(image_features, pair_features, scale)
        return AdaptResult(labels, loss, disagreement, features=teacher_images)

    def teacher_logits(
        self, student: Student, pixels: Pixels, images: Tensor, texts: Tensor
    ) -> Tensor:
        """Cosines `[B, C]` of the teacher's features of images `[B, D]` and captions `[C, D]`."""
        return images @ texts.T

    def after_stream_step(self, student: Student) -> None:  # line 19
        self._update_teacher(student, self.ema.lam)

    def _update_teacher(self, student: Student, active: float) -> None:
        """θ^T ← p θ^T + q θ^S: `active` is p on trainable entries, δ on frozen ones."""
        student.ema_update(self.teacher, active_momentum=active, frozen_momentum=self.ema.delta)

    # Prediction and state

    def experts(self, student: Student) -> Mapping[str, Backbone]:
        return {"teacher": self.teacher, "student": student.backbone}

    def shared_copies(self) -> Mapping[str, Backbone]:
        return {"teacher": self.teacher}

    def state_dict(self) -> Tensors:
        # Stored names do not change.
        return {f"best/{name}": score for name, score in self.union_scores.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.union_scores = select_prefix("best/", tensors)
