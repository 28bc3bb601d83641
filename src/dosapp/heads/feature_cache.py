"""A cache of image features: those of lowest entropy for each pseudo-label. No image is kept."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass
class FeatureCache:
    """At most `capacity` features of each class, each with a mask of the classes it adds to.

    Example:
        >>> cache = FeatureCache(capacity=1)
        >>> labels, entropies = torch.tensor([0, 0]), torch.tensor([0.5, 0.2])
        >>> cache.add(torch.eye(2), labels, entropies, torch.ones(2, 3))
        >>> cache.features.tolist()
        [[0.0, 1.0]]
    """

    capacity: int
    features: Tensor = field(default_factory=lambda: torch.zeros(0, 0))  # [K, D]
    labels: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # [K]
    entropies: Tensor = field(default_factory=lambda: torch.zeros(0))  # [K]
    values: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool))  # [K, C]

    def __len__(self) -> int:
        return len(self.labels)

    def add(self, features: Tensor, labels: Tensor, entropies: Tensor, values: Tensor) -> None:
        """Add features `[n, D]` and keep the best of each class; the older one if two are equal.

        Args:
            features: Unit features of images.
            labels: Their pseudo-labels `[n]`.
            entropies: Of their predictions `[n]`.
            values: The classes whose logits each changes `[n, C]`, a mask.
        """
        if len(self):
            features = torch.cat([self.features, features])
            labels = torch.cat([self.labels, labels])
            entropies = torch.cat([self.entropies, entropies])
            values = torch.cat([self.padded_values(values.shape[1]), values.bool()])
        order = entropies.argsort(stable=True)
        kept = [order[labels[order] == label][: self.capacity] for label in labels.unique()]
        rows = torch.cat(kept) if kept else order
        self.features, self.labels = features[rows], labels[rows]
        self.entropies, self.values = entropies[rows], values[rows].bool()

    def padded_values(self, classes: int) -> Tensor:
        """The values `[K, C]`; classes that came later are in none."""
        return pad(self.values, (0, classes - self.values.shape[1]))

    def weigh(self, features: Tensor, beta: float, classes: int) -> Tensor:
        """Σ_k exp(-β (1 - f·f_k)) · value of k: the cache's term of each logit `[B, C]`."""
        if not len(self):
            return features.new_zeros(features.shape[0], classes)  # `len` is fixed in an export
        affinity = (-beta * (1 - features @ self.features.T)).exp()  # [B, K]
        return affinity @ self.padded_values(classes).to(features)

    def clear(self) -> None:
        """Forget all features."""
        self.load_state_dict(FeatureCache(self.capacity).state_dict())

    def remove_class(self, index: int) -> None:
        """Drop a class; the indices of those after it decrease by one."""
        kept = self.labels != index
        labels, values = self.labels[kept], self.values[kept]
        self.features, self.entropies = self.features[kept], self.entropies[kept]
        self.labels = labels - (labels > index).long()
        self.values = torch.cat([values[:, :index], values[:, index + 1 :]], dim=1)

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors to save."""
        names = ("features", "labels", "entropies", "values")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state_dict`."""
        self.features, self.labels = state["features"], state["labels"]
        self.entropies, self.values = state["entropies"], state["values"]
