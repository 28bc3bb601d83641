"""RanPAC: ridge regression on random features, accumulated over sessions (McDonnell et al., 2023).

    h = ReLU(f W)          W: D x M, random, a function of the seed and never stored
    G ← G + hᵀh            Q ← Q + hᵀY, Y one-hot
    logits = scale · h (G + λI)⁻¹ Q

λ is the power of ten from 10⁻⁸ to 10⁸ with the smallest squared error on a fifth of each class when
four fifths are fitted, session by session. The released code takes the last session's choice; here
the errors of all sessions are added, so that the order of sessions does not matter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import one_hot, relu

from dosapp.functional.class_indices import remove_class_index
from dosapp.heads.class_statistics import missing_statistics
from dosapp.runtime.rng import torch_rng

RIDGES = 10.0 ** torch.arange(-8, 9, dtype=torch.float64)  # candidates for λ
DEFAULT_RIDGE = 1.0  # if no class has an image to validate on
VALIDATION = 5  # every fifth image of a class


@dataclass
class RandomFeatureStatistics:
    """G, and Q by class index, in float64: 16 MB for M = 2,000, since half of G is stored.

    Example:
        >>> statistics = RandomFeatureStatistics(width=8)
        >>> statistics.add_session(torch.eye(3), torch.tensor([0, 1, 1]))
        >>> statistics.gram.shape, sorted(statistics.sums)
        (torch.Size([8, 8]), [0, 1])
    """

    width: int = 2000  # M
    seed: int = 0
    gram: Tensor | None = None  # G [M, M]
    sums: dict[int, Tensor] = field(default_factory=dict)  # columns of Q [M]
    errors: Tensor = field(default_factory=lambda: torch.zeros_like(RIDGES))  # by λ, squared
    revision: int = 0  # increased by every change
    _weights: Tensor | None = None

    def project(self, features: Tensor) -> Tensor:
        """h `[n, M]` of features `[n, D]`."""
        if self._weights is None or len(self._weights) != features.shape[1]:
            generator = torch_rng("ranpac", self.seed)
            self._weights = torch.randn(features.shape[1], self.width, generator=generator)
        return relu(features @ self._weights.to(features))

    def add_session(self, features: Tensor, labels: Tensor) -> None:
        """Add features `[n, D]` of classes `[n]`, new or known."""
        hidden, labels = self.project(features.cpu().double()), labels.cpu()
        gram = hidden.T @ hidden
        self.gram = gram if self.gram is None else self.gram + gram
        for label in labels.unique().tolist():
            total = hidden[labels == label].sum(dim=0)
            self.sums[label] = self.sums[label] + total if label in self.sums else total
        self.errors = self.errors + validation_errors(hidden, labels)
        self.revision += 1

    @property
    def ridge(self) -> float:
        """λ."""
        return float(RIDGES[self.errors.argmin()]) if self.errors.any() else DEFAULT_RIDGE

    def solve(self, classes: int) -> Tensor:
        """(G + λI)⁻¹ Q `[M, C]`.

        Raises:
            InputError: A class has no statistics.
        """
        missing = next((label for label in range(classes) if label not in self.sums), None)
        if missing is not None:
            raise missing_statistics(missing, classes)
        assert self.gram is not None
        targets = torch.stack([self.sums[label] for label in range(classes)], dim=1)
        ridge = self.ridge * torch.eye(self.width, dtype=torch.float64)
        solved: Tensor = torch.linalg.solve(self.gram + ridge, targets)
        return solved

    def remove_class(self, index: int) -> None:
        """Drop a column of Q; the indices of those after it decrease by one. G stays."""
        self.sums = remove_class_index(self.sums, index)
        self.revision += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors to save: G is symmetric, so its upper triangle is enough."""
        if self.gram is None:
            return {}
        labels, none = list(self.sums), self.gram.new_zeros(0, self.width)
        return {
            "labels": torch.tensor(labels, dtype=torch.int64),
            "sums": torch.stack(list(self.sums.values())) if labels else none,
            "gram": self.gram[tuple(torch.triu_indices(self.width, self.width))],
            "errors": self.errors,
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state_dict`."""
        state = {name: tensor.cpu() for name, tensor in state.items()}
        self.gram, self.sums, self.errors = None, {}, torch.zeros_like(RIDGES)
        if state:
            upper = torch.zeros(self.width, self.width, dtype=torch.float64)
            upper[tuple(torch.triu_indices(self.width, self.width))] = state["gram"]
            self.gram = upper + upper.triu(diagonal=1).T
            self.sums = dict(zip(state["labels"].tolist(), state["sums"], strict=True))
            self.errors = state["errors"]
        self.revision += 1


def validation_errors(hidden: Tensor, labels: Tensor) -> Tensor:
    """Squared errors on every fifth image of each class, when the others are fitted with each λ.

    Args:
        hidden: Random features of a session's images `[n, M]`.
        labels: Their classes `[n]`.

    Returns:
        Sums over images and classes `[17]`, in the order of `RIDGES`; zeros if no class has five
        images.
    """
    _, targets = labels.unique(return_inverse=True)
    order = (one_hot(targets).cumsum(dim=0) * one_hot(targets)).sum(dim=1)  # 1, 2, … in each class
    held_out = order % VALIDATION == 0
    if not held_out.any():
        return torch.zeros_like(RIDGES)
    fitted, truth = hidden[~held_out], one_hot(targets).to(hidden)
    # (hᵀh + λI)⁻¹hᵀY = hᵀ(hhᵀ + λI)⁻¹Y: the smaller of both matrices is decomposed, once for all λ.
    is_wide = len(fitted) <= hidden.shape[1]
    values, vectors = torch.linalg.eigh(fitted @ fitted.T if is_wide else fitted.T @ fitted)
    left = hidden[held_out] @ (fitted.T @ vectors if is_wide else vectors)
    right = vectors.T @ (truth[~held_out] if is_wide else fitted.T @ truth[~held_out])
    values = values.clamp(min=0)  # rounding
    predictions = [left @ (right / (values + ridge)[:, None]) for ridge in RIDGES]
    return torch.stack([(p - truth[held_out]).square().sum() for p in predictions])


@dataclass
class RanPACHead:
    """Ridge regression on random features, beside the captions.

    Regressed values are near 1 for the right class and near 0 for the others, as cosines are, so
    CLIP's scale makes logits of them. With a text weight this is RAIL's fusion (Xu et al., 2024)
    on logits.
    """

    statistics: RandomFeatureStatistics
    scale: Tensor
    text_weight: float = 0.0  # of the captions' logits
    _solved: tuple[tuple[int, int], Tensor] | None = None

    def score(self, features: Tensor, text_features: Tensor) -> Tensor:
        """Logits `[B, C]`."""
        key = (self.statistics.revision, len(text_features))
        if self._solved is None or self._solved[0] != key:
            self._solved = (key, self.statistics.solve(len(text_features)))
        scores = self.statistics.project(features) @ self._solved[1].to(features)
        return self.scale * (scores + self.text_weight * features @ text_features.T)
