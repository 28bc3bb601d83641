"""Attackers of a stream: each makes the images that one caller with the predict role sends.

An attacker has images of its own (of the service's domain, without labels), may ask the service
with `learn=false`, and some have a surrogate: the same backbone at the published weights. An honest
part of the traffic is added elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dosapp.data.preprocess import to_bytes, to_float
from dosapp.heads.base import score_with_expert
from dosapp.learner.learner import Learner

Ask = Callable[[Tensor], list[str]]  # images → labels, not learned from
BLEND_WEIGHTS = (0.35, 0.6)
PGD_STEPS = 5
CANDIDATES = 128  # blends asked about at once
MAX_QUESTIONS = 20  # of CANDIDATES blends per batch


@dataclass
class Attacker:
    """What an attacker knows and has.

    Args:
        pool: Its own images, `uint8 [n, 3, H, W]`.
        ask: The service, asked without learning.
        surrogate: Gives the published model; an attacker with the backbone can come close to it.
        rng: Of its choices.
    """

    pool: Tensor
    ask: Ask
    surrogate: Callable[[], Learner]
    rng: np.random.Generator
    _answers: list[str] = field(default_factory=list)
    _kept: dict[str, Tensor] = field(default_factory=dict)

    def observe(self) -> None:
        """Ask about all images of the pool again: the service has a new version."""
        self._answers = self.ask(self.pool)
        self._kept = {}

    def classes(self) -> list[str]:
        """The answers it has seen, in alphabetic order."""
        return sorted(set(self._answers))

    def honest(self, count: int) -> Tensor:
        """Images of the pool as they are."""
        return self.pool[torch.from_numpy(self.rng.integers(0, len(self.pool), count))]

    def one_class(self, count: int) -> Tensor:
        """Images of one class, as they are."""
        return self._choose(self._rows(self.classes()[0]), count)

    def repeats(self, count: int) -> Tensor:
        """One image again and again."""
        return self.pool[:1].expand(count, -1, -1, -1)

    def noise(self, count: int) -> Tensor:
        """Uniform noise."""
        shape = (count, *self.pool.shape[1:])
        return torch.from_numpy(self.rng.integers(0, 256, shape, dtype=np.uint8))

    def blends(self, count: int, target: str, sources: Sequence[str] | None = None) -> Tensor:
        """Blends w·target + (1 - w)·other that are answered as the target.

        Args:
            count: How many.
            target: The class that shall grow.
            sources: Classes of the other image; None for all but the target.
        """
        images, other = self._rows(target), self._rows(target, sources, equal=False)
        kept = self._kept.get(target, self.pool[:0])
        for _ in range(MAX_QUESTIONS):
            if len(kept) >= count:
                break
            weights = torch.from_numpy(self.rng.uniform(*BLEND_WEIGHTS, (CANDIDATES, 1, 1, 1)))
            first, second = self._choose(images, CANDIDATES), self._choose(other, CANDIDATES)
            blend = (weights * first + (1 - weights) * second).round().to(torch.uint8)
            is_target = torch.tensor([label == target for label in self.ask(blend)])
            kept = torch.cat([kept, blend[is_target]])
        self._kept[target] = kept[count:]
        return kept[:count] if len(kept) >= count else self._choose(images, count)

    def perturbed(self, count: int, target: str, eps: float) -> Tensor:
        """Honest images, changed by PGD on the surrogate to be answered as the target.

        Args:
            count: How many.
            target: The class that shall grow.
            eps: Largest change of a pixel, of 255.
        """
        start = to_float(self.honest(count))
        return self._descend(start, eps, cross_entropy, target)

    def near_boundary(self, count: int, target: str, eps: float = 8) -> Tensor:
        """Label-consistent: images of the target, moved to its boundary and still answered so."""

        def loss(logits: Tensor, index: Tensor) -> Tensor:
            own = logits.gather(1, index[:, None])
            gap = own - logits.scatter(1, index[:, None], -torch.inf).max(dim=1, keepdim=True)[0]
            return (gap - 0.5).abs().mean()  # just inside

        start = to_float(self._choose(self._rows(target), count))
        return self._descend(start, eps, loss, target)

    def _descend(
        self, start: Tensor, eps: float, loss: Callable[[Tensor, Tensor], Tensor], target: str
    ) -> Tensor:
        published = self.surrogate()
        # A copy: what a head computed for predictions (in inference mode) gives no gradients.
        learner = published.at(published.state(), trainable=False)
        _, expert = learner.answering_expert
        with torch.no_grad():
            texts = learner.student.text_head.class_embeddings(expert).clone()
            scale = float(expert.logit_scale)
        index = torch.full((len(start),), learner.classes.index(target))
        limit, pixels = eps / 255, start.clone()
        for _ in range(PGD_STEPS):
            pixels.requires_grad_()
            logits = scale * score_with_expert(expert, expert.encode_image(pixels), texts)
            (gradient,) = torch.autograd.grad(loss(logits, index), pixels)
            moved = pixels.detach() - limit / 2 * gradient.sign()
            pixels = torch.clamp(start + (moved - start).clamp(-limit, limit), 0, 1)
        return to_bytes(pixels)

    def _rows(
        self, target: str, among: Sequence[str] | None = None, equal: bool = True
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Rows of the pool that were answered as the target, or as another class."""
        rows = [
            n
            for n, label in enumerate(self._answers)
            if (label == target) is equal and (among is None or label in among)
        ]
        return np.array(rows or range(len(self.pool)))

    def _choose(self, rows: np.ndarray[tuple[int], np.dtype[np.int64]], count: int) -> Tensor:
        return self.pool[torch.from_numpy(self.rng.choice(rows, count))]
