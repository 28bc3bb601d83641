"""The paper's mitigations for streams that cannot be trusted (its section on limitations).

All four are off by default. They work with every adapter, because the learner owns the step:
confidence gating skips images on which every expert is unsure; entropy-based scaling lowers the
learning rate on unsure batches; a skew-aware EMA slows teachers down on class-skewed streams; mask
reactivation swaps a share of the mask, in rotations, for entries of earlier sessions.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dosapp.functional.class_skew import class_skew
from dosapp.functional.losses import entropy
from dosapp.functional.masks import Mask, Scores, reactivate_entries
from dosapp.functional.named_tensors import select_prefix
from dosapp.methods.base import AdaptResult, Method
from dosapp.student.student import Student
from dosapp.student.trainable_weights import Selection

HISTOGRAM_DECAY = 0.9  # per batch


@dataclass(frozen=True)
class BatchCheck:
    """What the experts say about a batch before it is learned from."""

    trusted: Tensor | None = None  # [B] bool: images to learn from; None: all
    labels: Tensor | None = None  # [B], of the most confident expert
    lr_scale: float = 1.0

    def select_trusted(self, pixels: Tensor) -> Tensor:
        """The trusted images."""
        return pixels if self.trusted is None else pixels[self.trusted]

    def add_skipped_labels(self, result: AdaptResult | None) -> AdaptResult | None:
        """Add the experts' labels of the images that the adapter did not get."""
        if self.labels is None or self.trusted is None:
            return result
        labels = self.labels.clone()
        if result is None:
            return AdaptResult(labels, trusted=self.trusted)
        labels[self.trusted] = result.labels
        return replace(result, labels=labels, trusted=self.trusted)


@dataclass
class Mitigations:
    """Settings and state of the four mitigations."""

    confidence_gate: float = 0.0  # least probability of the most confident expert
    entropy_lr_scaling: bool = False  # learning rate times 1 - mean entropy / ln C
    skew_aware_ema: bool = False  # momentum from λ towards δ with the stream's class skew
    mask_reactivation: float = 0.0  # share of the mask that is swapped
    reactivation_interval: int = 10  # stream steps per rotation
    histogram: Tensor = field(default_factory=lambda: torch.zeros(0))  # [C] of recent labels
    scores: Scores = field(default_factory=dict)  # best of all sessions, zero if never selected
    source_session: dict[str, Tensor] = field(default_factory=dict)  # of that score, from 1
    stream_mask: Mask = field(default_factory=dict)  # the mask without swaps
    steps: int = 0  # on this stream

    @torch.inference_mode()
    def check_batch(self, student: Student, method: Method, pixels: Tensor) -> BatchCheck:
        """Ask the experts about a batch, if a mitigation needs it."""
        is_needed = self.confidence_gate or self.entropy_lr_scaling or self.skew_aware_ema
        if not is_needed or not method.adapts:
            return BatchCheck()
        experts = method.experts(student).values()
        logits = torch.stack(
            [expert.logit_scale * student.score_images(pixels, expert) for expert in experts]
        )  # [experts, B, C]
        confidence = logits.softmax(dim=2).max(dim=2)  # [experts, B]
        best = confidence.values.argmax(dim=0)  # [B]
        rows, classes = torch.arange(len(pixels), device=best.device), logits.shape[2]
        labels = confidence.indices[best, rows]
        if self.skew_aware_ema:
            counts = labels.bincount(minlength=classes).float()
            old = self.histogram if len(self.histogram) == classes else torch.zeros_like(counts)
            self.histogram = HISTOGRAM_DECAY * old + counts
            student.stream_skew = class_skew(self.histogram)
        trusted = confidence.values.max(dim=0).values >= self.confidence_gate
        lr_scale = 1.0
        if self.entropy_lr_scaling and classes > 1 and trusted.any():
            mean_entropy = entropy(logits[best, rows][trusted]).mean().item()
            lr_scale = max(0.0, 1 - mean_entropy / math.log(classes))
        return BatchCheck(trusted.clone(), labels.clone(), lr_scale)

    def remove_class(self, index: int) -> None:
        """Reset the histogram, whose classes have changed."""
        self.histogram = torch.zeros(0)

    # Mask reactivation

    def record_selection(self, selection: Selection, session: int) -> None:
        """Keep each entry's best score and the session it is of."""
        if not self.mask_reactivation:
            return
        if selection.mask is None or selection.scores is None:
            warnings.warn("mask_reactivation has no effect: the method has no mask", stacklevel=2)
            return
        for name, score in selection.scores.items():
            new = score * selection.mask[name]
            old = self.scores.get(name, torch.zeros_like(new))
            sessions = self.source_session.get(name, torch.zeros_like(new, dtype=torch.int16))
            self.source_session[name] = torch.where(new > old, session + 1, sessions)
            self.scores[name] = torch.maximum(old, new)

    def begin_stream(self, student: Student) -> None:
        """Start a stream with the student's current mask."""
        self.histogram, self.steps = torch.zeros(0), 0
        mask = (student.selection.mask or {}) if self.mask_reactivation else {}
        self.stream_mask = {n: m for n, m in mask.items() if n in self.scores}
        self._reactivate(student)

    def after_stream_step(self, student: Student) -> None:
        """Swap other entries into the mask when a rotation is over."""
        self.steps += 1
        if self.steps % self.reactivation_interval == 0:
            self._reactivate(student)

    def _reactivate(self, student: Student) -> None:
        if self.stream_mask:
            rotation = self.steps // self.reactivation_interval
            student.change_mask(
                reactivate_entries(
                    self.stream_mask,
                    self.scores,
                    self.source_session,
                    self.mask_reactivation,
                    rotation,
                )
            )

    # State

    def state_dict(self) -> dict[str, Tensor]:
        """What every version of the learner stores."""
        groups = {"scores": self.scores, "owner": self.source_session, "base": self.stream_mask}
        state = {f"{group}/{n}": t for group, held in groups.items() for n, t in held.items()}
        if self.mask_reactivation:
            state["steps"] = torch.tensor(self.steps)
        return state | ({"histogram": self.histogram} if len(self.histogram) else {})

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore `state_dict`."""
        self.scores, self.source_session, self.stream_mask = (
            select_prefix(f"{group}/", tensors) for group in ("scores", "owner", "base")
        )
        self.histogram = tensors.get("histogram", torch.zeros(0))
        self.steps = int(tensors.get("steps", torch.tensor(0)))
