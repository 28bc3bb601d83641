"""SLCA's class statistics: a Gaussian of the image features of each class."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dosapp.functional.class_indices import remove_class_index

RIDGE = 1e-4  # added to every variance: a class may have fewer features than dimensions


@dataclass
class ClassGaussians:
    """By class index: mean `[W]`, factor L with LLᵀ = covariance `[W, W]`, and session from 1."""

    means: dict[int, Tensor] = field(default_factory=dict)
    factors: dict[int, Tensor] = field(default_factory=dict)
    session: dict[int, int] = field(default_factory=dict)

    def fit(self, label: int, features: Tensor, session: int) -> None:
        """Estimate the Gaussian of a class from its features `[n, W]`."""
        mean = features.mean(dim=0)
        centred = (features - mean).double()
        covariance = centred.T @ centred / max(1, len(features) - 1)
        ridge = RIDGE * torch.eye(features.shape[1], dtype=torch.float64, device=features.device)
        self.means[label] = mean
        self.factors[label] = torch.linalg.cholesky(covariance + ridge).to(mean)
        self.session[label] = session

    def sessions(self) -> Tensor:
        """The session of each class `[C]`."""
        return torch.tensor([self.session[label] for label in sorted(self.means)])

    def sample(self, count: int, now: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw features `[count, W]` and labels, all classes equally likely.

        Means of earlier sessions shrink by 0.9 + 0.1 · session / `now`, as in SLCA's code.
        """
        classes = torch.tensor(sorted(self.means))
        labels = classes[torch.randint(len(classes), (count,), generator=generator)]
        mean = self.means[int(classes[0])]
        noise = torch.randn(count, len(mean), generator=generator).to(mean.device)
        features = torch.empty_like(noise)
        for label in labels.unique().tolist():
            rows = labels == label
            shrink = 0.9 + 0.1 * self.session[label] / now
            features[rows] = self.means[label] * shrink + noise[rows] @ self.factors[label].T
        return features, labels.to(mean.device)

    def remove_class(self, index: int) -> None:
        """Drop a class; the indices of those after it decrease by one."""
        self.means = remove_class_index(self.means, index)
        self.factors = remove_class_index(self.factors, index)
        self.session = remove_class_index(self.session, index)

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors to save."""
        if not self.means:
            return {}
        return {
            "means": torch.stack([self.means[label] for label in self.means]),
            "factors": torch.stack([self.factors[label] for label in self.means]),
            "session": torch.tensor([[label, self.session[label]] for label in self.means]),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> "ClassGaussians":
        """Restore `state_dict`."""
        if "session" not in state:
            return cls()
        pairs = state["session"].tolist()
        labels = [label for label, _ in pairs]
        return cls(
            dict(zip(labels, state["means"], strict=True)),
            dict(zip(labels, state["factors"], strict=True)),
            dict(pairs),
        )
