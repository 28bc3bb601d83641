"""Temperature of a head's logits (Guo et al., 2017), chosen on features it was not fitted on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

# 1 … 32, 12 % apart. Not below one: a few images, all classified correctly, would choose the least.
TEMPERATURES = torch.logspace(0, 1.5, 31, dtype=torch.float64)


@dataclass
class Temperature:
    """Held-out cross-entropy at each of `TEMPERATURES`, summed over all sessions.

    If all of n held-out images are right, the smallest temperature has the least loss, whatever the
    logits are. So the mean confidence may be (n + 1) / (n + 2) at most, the rule of succession.

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
    confidences: Tensor = field(default_factory=lambda: torch.zeros_like(TEMPERATURES))  # sums, too
    images: int = 0  # held out; learners of earlier versions did not count them

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add held-out logits `[n, C]` and their classes `[n]`."""
        logits, labels = logits.cpu().double(), labels.cpu()
        scaled = [logits / t for t in TEMPERATURES]
        self.losses = self.losses + torch.stack(
            [cross_entropy(x, labels, reduction="sum") for x in scaled]
        )
        self.confidences = self.confidences + torch.stack(
            [x.softmax(dim=1).amax(dim=1).sum() for x in scaled]
        )
        self.images += len(labels)

    @property
    def has_held_out(self) -> bool:
        """Whether there were images to choose a temperature on."""
        return self.images > 0 or bool(self.losses.any())

    @property
    def value(self) -> float:
        """The temperature with the smallest loss; one if nothing was held out."""
        if not self.has_held_out:
            return 1.0
        # Confidence falls with the temperature.
        is_unsure = self.confidences <= self.images * (self.images + 1) / (self.images + 2)
        least = int(is_unsure.int().argmax()) if is_unsure.any() else len(TEMPERATURES) - 1
        return TEMPERATURES[max(int(self.losses.argmin()), least)].item()

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors to save."""
        images = torch.tensor(self.images)
        return {"losses": self.losses, "confidences": self.confidences, "images": images}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore `state_dict`; learners of earlier versions have a part of it, or nothing."""
        none = torch.zeros_like(TEMPERATURES)
        self.losses, self.confidences = (
            tensors.get(name, none).cpu() for name in ("losses", "confidences")
        )
        self.images = int(tensors.get("images", 0))


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
