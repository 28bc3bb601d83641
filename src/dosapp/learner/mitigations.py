"""What holds adaptation back when the stream cannot be trusted: the paper's own mitigations.

Four values, each off by default, that work with every adapter because the learner owns the step:
a gate (images no expert is sure of are not learned from), a tempered rate (unsure batches move the
weights less), teachers that follow more slowly when few classes fill the stream, and a share of the
mask lent, in turns, to entries of earlier sessions.
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
from dosapp.student.selection import Selection
from dosapp.student.student import Student

MEMORY = 0.9  # of the histogram, per batch


@dataclass(frozen=True)
class BatchCheck:
    """A batch as the experts see it before anything is learned from it."""

    trusted: Tensor  # [B] bool: the images to learn from
    labels: Tensor | None = None  # [B], of the surest expert
    rate: float = 1.0  # times the learning rate

    def completed(self, guess: AdaptResult | None) -> AdaptResult | None:
        """The adapter's guess, with the experts' labels for the images it was not shown."""
        if self.labels is None:
            return guess
        labels = self.labels.clone()
        if guess is None:
            return AdaptResult(labels, trusted=self.trusted)
        labels[self.trusted] = guess.labels
        return replace(guess, labels=labels, trusted=self.trusted)


@dataclass
class Mitigations:
    gate: float = 0.0  # least probability of the surest expert's answer
    temper: bool = False  # rate times 1 - mean entropy / ln C
    skew_aware: bool = False  # momentum from λ towards δ as the stream's classes skew
    readmit: float = 0.0  # share of the mask that earlier sessions take turns in
    every: int = 10  # stream steps per turn
    histogram: Tensor = field(default_factory=lambda: torch.zeros(0))  # [C] of recent answers
    scores: Scores = field(default_factory=dict)  # best of all sessions, zero where never chosen
    owner: dict[str, Tensor] = field(default_factory=dict)  # which session that best is of, from 1
    base: Mask = field(default_factory=dict)  # the stream's own mask
    steps: int = 0  # of this stream
    gated: int = 0  # images of the last batch that were not learned from

    @torch.inference_mode()
    def look(self, student: Student, method: Method, pixels: Tensor) -> BatchCheck:
        """Ask the experts first, if anything depends on it."""
        everything = torch.ones(len(pixels), dtype=torch.bool, device=pixels.device)
        if not (self.gate or self.temper or self.skew_aware) or not method.adapts:
            return BatchCheck(everything)
        asked = torch.stack(
            [
                net.logit_scale * student.logits(pixels, net)
                for net in method.experts(student).values()
            ]
        )  # [experts, B, C]
        sure = asked.softmax(dim=2).max(dim=2)  # [experts, B]
        best = sure.values.argmax(dim=0)  # [B]
        images, classes = torch.arange(len(pixels), device=best.device), asked.shape[2]
        labels = sure.indices[best, images]
        if self.skew_aware:
            seen = labels.bincount(minlength=classes).float()
            old = self.histogram if len(self.histogram) == classes else torch.zeros_like(seen)
            self.histogram = MEMORY * old + seen
            student.stream_skew = class_skew(self.histogram)
        trusted, rate = sure.values.max(dim=0).values >= self.gate, 1.0
        self.gated = int((~trusted).sum())
        if self.temper and classes > 1 and trusted.any():
            unsure = entropy(asked[best, images][trusted]).mean().item()
            rate = max(0.0, 1 - unsure / math.log(classes))
        return BatchCheck(trusted.clone(), labels.clone(), rate)

    def remove_class(self, index: int) -> None:
        """A class has gone: the answers are counted anew."""
        self.histogram = torch.zeros(0)

    # Lending a share of the mask

    def remember(self, chosen: Selection, session: int) -> None:
        """A session has chosen: keep each entry's best score, and whose it is."""
        if not self.readmit:
            return
        if chosen.mask is None or chosen.scores is None:
            warnings.warn("readmit has no effect: the learner moves no mask", stacklevel=2)
            return
        for name, score in chosen.scores.items():
            new = score * chosen.mask[name]
            old = self.scores.get(name, torch.zeros_like(new))
            whose = self.owner.get(name, torch.zeros_like(new, dtype=torch.int16))
            self.owner[name] = torch.where(new > old, session + 1, whose)
            self.scores[name] = torch.maximum(old, new)

    def begin_stream(self, student: Student) -> None:
        self.histogram, self.steps = torch.zeros(0), 0
        mask = student.selection.mask or {}
        self.base = {n: m for n, m in mask.items() if n in self.scores} if self.readmit else {}
        self._lend(student)

    def after_step(self, student: Student) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            self._lend(student)

    def _lend(self, student: Student) -> None:
        if self.base:
            turn = self.steps // self.every
            student.change_mask(
                reactivate_entries(self.base, self.scores, self.owner, self.readmit, turn)
            )

    # Saving

    def state_dict(self) -> dict[str, Tensor]:
        parts = {"scores": self.scores, "owner": self.owner, "base": self.base}
        kept = {f"{part}/{name}": t for part, held in parts.items() for name, t in held.items()}
        if self.readmit:
            kept["steps"] = torch.tensor(self.steps)
        return kept | ({"histogram": self.histogram} if len(self.histogram) else {})

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.scores, self.owner, self.base = (
            select_prefix(f"{part}/", tensors) for part in ("scores", "owner", "base")
        )
        self.histogram = tensors.get("histogram", torch.zeros(0))
        self.steps = int(tensors.get("steps", torch.tensor(0)))
