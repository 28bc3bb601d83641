"""Class means and a pooled scatter matrix of image features: what closed-form heads are made of.

No image is kept. Features are added class by class in any order, and sums are in float64, so the
order of sessions does not matter. `learner/class_head.py` collects them, and moves them with the
stream; the heads are in `gaussian.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dosapp.errors import InputError
from dosapp.functional.class_indices import remove_class_index

UNKNOWN_PRECISION = 100.0  # as CLIP's scale


@dataclass
class ClassStatistics:
    """By class index: number of features and their mean `[D]`; one scatter matrix for all.

    The scatter `[D, D]` is Σ_c Σ_i (f_i - μ_c)(f_i - μ_c)ᵀ.

    Example:
        >>> statistics = ClassStatistics()
        >>> statistics.add(0, torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> statistics.means[0].tolist(), statistics.counts
        ([0.5, 0.5], {0: 2})
    """

    counts: dict[int, int] = field(default_factory=dict)
    means: dict[int, Tensor] = field(default_factory=dict)
    scatter: Tensor | None = None
    total: int = 0  # features in the scatter, also of removed classes
    revision: int = 0  # increased by every change; solved classifiers are keyed by it

    def add(self, label: int, features: Tensor) -> None:
        """Add features `[n, D]` of a class, new or known."""
        features, count = features.cpu().double(), len(features)  # not every device has float64
        mean = features.mean(dim=0)
        centred = features - mean
        scatter = centred.T @ centred
        known = self.counts.get(label, 0)
        if known:  # two parts of one class: their means differ, and that is scatter too
            gap = mean - self.means[label]
            scatter += known * count / (known + count) * torch.outer(gap, gap)
            mean = self.means[label] + count / (known + count) * gap
        self.counts[label], self.means[label] = known + count, mean
        self.scatter = scatter if self.scatter is None else self.scatter + scatter
        self.total += count
        self.revision += 1

    def add_session(self, features: Tensor, labels: Tensor) -> None:
        """Add features `[n, D]` of classes `[n]`, new or known."""
        for label in labels.unique().tolist():
            self.add(label, features[labels == label])

    def stack_means(self, classes: int) -> Tensor:
        """The means `[C, D]` of all classes.

        Raises:
            InputError: A class has no statistics.
        """
        missing = next((label for label in range(classes) if label not in self.means), None)
        if missing is not None:
            raise missing_statistics(missing, classes)
        return torch.stack([self.means[label] for label in range(classes)])

    def precision(self) -> Tensor:
        """The shrunk inverse of the pooled covariance, `(n - 1) · pinv(scatter + tr(S) · I)`.

        S is scatter / (n - 1). Wang et al. (2024) write d for the first n - 1, which the weight
        that they tune per dataset absorbs; with n - 1 scores are log-likelihoods.
        """
        assert self.scatter is not None
        freedom = max(1, self.total - 1)
        ridge = self.scatter.trace() / freedom
        identity = torch.eye(len(self.scatter)).to(self.scatter)
        if ridge < 1e-9:  # one image per class: no variance is known, so the nearest mean wins
            return UNKNOWN_PRECISION * identity
        inverse: Tensor = torch.linalg.pinv(self.scatter + ridge * identity, hermitian=True)
        return freedom * inverse

    def remove_class(self, index: int) -> None:
        """Drop a class; the indices of those after it decrease by one. The scatter stays."""
        self.counts = remove_class_index(self.counts, index)
        self.means = remove_class_index(self.means, index)
        self.revision += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors to save."""
        if self.scatter is None:
            return {}
        labels, none = list(self.counts), self.scatter.new_zeros(0, len(self.scatter))
        counts = [[label, self.counts[label]] for label in labels]
        return {
            "counts": torch.tensor(counts, dtype=torch.int64).reshape(-1, 2),
            "means": torch.stack([self.means[label] for label in labels]) if labels else none,
            "scatter": self.scatter,
            "total": torch.tensor(self.total),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state_dict`."""
        state = {name: tensor.cpu() for name, tensor in state.items()}
        self.counts = dict(state["counts"].tolist()) if state else {}
        self.means = dict(zip(self.counts, state["means"], strict=True)) if state else {}
        self.scatter = state["scatter"] if state else None
        self.total = int(state["total"]) if state else 0
        self.revision += 1


def missing_statistics(label: int, classes: int) -> InputError:
    """Build the error for a class that a head cannot score."""
    return InputError(
        f"class {label + 1} of {classes} has no statistics, because no image of it was learned; "
        "train a session with its images, or remove it"
    )
