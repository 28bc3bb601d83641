"""NOTE's prediction-balanced reservoir sampling (PBRS): images balanced by predicted class."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class BalancedReservoir:
    """At most `capacity` images of a stream with their predicted classes."""

    capacity: int
    images: list[Tensor] = field(default_factory=list)  # [3, H, W] each
    labels: list[int] = field(default_factory=list)  # predicted class indices
    seen: Counter[int] = field(default_factory=Counter)  # n_c: images of each class so far

    @property
    def total_seen(self) -> int:
        """Number of images seen so far."""
        return self.seen.total()

    def add(self, image: Tensor, label: int, generator: torch.Generator) -> None:
        """Store the image, or not, as PBRS decides.

        When the reservoir is full, an image of a class that is not among the largest replaces a
        random image of one of those. An image of a largest class replaces one of its own class with
        probability m_c / n_c.
        """
        self.seen[label] += 1
        if len(self.labels) < self.capacity:
            self.images.append(image.clone())
            self.labels.append(label)
            return
        stored = Counter(self.labels)  # m_c
        largest = {c for c, n in stored.items() if n == max(stored.values())}
        if label in largest:
            if torch.rand((), generator=generator) > stored[label] / self.seen[label]:
                return
            largest = {label}
        candidates = [row for row, c in enumerate(self.labels) if c in largest]
        row = candidates[int(torch.randint(len(candidates), (), generator=generator))]
        self.images[row], self.labels[row] = image.clone(), label

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors to save."""
        if not self.labels:
            return {}
        return {
            "pictures": torch.stack(self.images),
            "labels": torch.tensor(self.labels),
            "seen": torch.tensor(sorted(self.seen.items())),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state_dict`."""
        if "labels" in state:
            self.images, self.labels = list(state["pictures"]), state["labels"].tolist()
            self.seen = Counter({int(c): int(n) for c, n in state["seen"]})
