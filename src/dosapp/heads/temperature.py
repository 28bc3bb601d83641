"""Temperature of a head's logits (Guo et al., 2017), chosen on features it was not fitted on."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

# 1 … 32, 12 % apart. Not below one: a few images, all classified correctly, would choose the least.
TEMPERATURES = torch.logspace(0, 1.5, 31, dtype=torch.float64)


@dataclass
class Temperature:
    """Held-out cross-entropy at each of `TEMPERATURES`, summed over all sessions.

    Sums need no features of earlier sessions. Each session is scored among the classes known then,
    so their order matters a little; the predicted classes do not depend on it.

    Example:
        >>> temperature = Temperature()
        >>> temperature.value  # nothing was held out yet
        1.0
        >>> logits = torch.tensor([[8.0, 0.0], [8.0, 0.0], [8.0, 0.0], [8.0, 0.0]])
        >>> temperature.add(logits, torch.tensor([0, 0, 0, 1]))  # three of four are right
        >>> 0.7 < (logits / temperature.value).softmax(dim=1)[0, 0].item() < 0.8
        True
    """

    losses: Tensor = field(default_factory=lambda: torch.zeros_like(TEMPERATURES))

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add held-out logits `[n, C]` and their classes `[n]`."""
        logits, labels = logits.cpu().double(), labels.cpu()
        self.losses = self.losses + torch.stack(
            [cross_entropy(logits / t, labels, reduction="sum") for t in TEMPERATURES]
        )

    @property
    def value(self) -> float:
        """The temperature with the smallest loss; one if nothing was held out."""
        return TEMPERATURES[self.losses.argmin()].item() if self.losses.any() else 1.0


def deal_folds(labels: Tensor, folds: int) -> Tensor:
    """Deal the images of each class over folds, so that all classes remain if a fold is held out.

    Args:
        labels: Classes `[n]`.
        folds: How many.

    Returns:
        The fold `[n]` of each image; -1 for the only image of a class, which is never held out.

    Example:
        >>> deal_folds(torch.tensor([0, 0, 1, 0]), folds=2).tolist()
        [0, 1, -1, 0]
    """
    dealt = torch.full_like(labels, -1)
    for label in labels.unique():
        rows = (labels == label).nonzero().squeeze(1)
        if len(rows) > 1:
            dealt[rows] = torch.arange(len(rows), device=labels.device) % folds
    return dealt
