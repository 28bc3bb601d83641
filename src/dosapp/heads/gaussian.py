"""Heads of class statistics: Gaussian discriminant analysis (GDA) and the nearest class mean."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import normalize

from dosapp.heads.class_statistics import ClassStatistics


@dataclass
class NearestMeanHead:
    """Nearest class mean: cosine with the normalised mean, times CLIP's scale."""

    statistics: ClassStatistics
    scale: Tensor

    def score(self, features: Tensor, text_features: Tensor) -> Tensor:
        """Logits `[B, C]`."""
        means = normalize(self.statistics.stack_means(len(text_features)), dim=1)
        return self.scale * features @ means.to(features).T


@dataclass
class GaussianHead:
    """Gaussian discriminant analysis with one covariance, beside the captions.

    logits_c = (f·Σ⁻¹μ_c - ½ μ_cᵀΣ⁻¹μ_c + scale · f·t_c) / temperature
    """

    statistics: ClassStatistics
    scale: Tensor  # of the captions; zero: features alone
    temperature: float = 1.0  # features are not Gaussian, so GDA is overconfident
    _solved: tuple[tuple[int, int], Tensor, Tensor] | None = None

    def score(self, features: Tensor, text_features: Tensor) -> Tensor:
        """Logits `[B, C]`."""
        weights, bias = self._classifier(len(text_features))
        scores = features @ weights.to(features).T - bias.to(features)
        return (scores + self.scale * features @ text_features.T) / self.temperature

    def _classifier(self, classes: int) -> tuple[Tensor, Tensor]:
        """Σ⁻¹μ_c `[C, D]` and ½ μ_cᵀΣ⁻¹μ_c `[C]`, solved once until the statistics change."""
        key = (self.statistics.revision, classes)
        if self._solved is None or self._solved[0] != key:
            means = self.statistics.stack_means(classes)
            weights = means @ self.statistics.precision()
            self._solved = (key, weights, (weights * means).sum(dim=1) / 2)
        return self._solved[1:]
