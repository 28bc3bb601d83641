"""TDA: a training-free dynamic adapter with a positive and a negative cache of stream features."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import one_hot

from dosapp.functional.losses import entropy
from dosapp.functional.named_tensors import select_prefix
from dosapp.heads.feature_cache import FeatureCache
from dosapp.methods.base import Tensors, UnitInterval, method_dataclass
from dosapp.methods.cache_adapter import CacheAdapter


@dataclass
class TDAHead:
    """CLIP's logits, plus a term of the positive cache, minus one of the negative cache."""

    positive: FeatureCache
    negative: FeatureCache
    weights: tuple[float, float]  # α
    sharpness: tuple[float, float]  # β
    scale: Tensor

    def score(self, features: Tensor, text_features: Tensor) -> Tensor:
        """Logits `[B, C]`."""
        classes = len(text_features)
        plus = self.weights[0] * self.positive.weigh(features, self.sharpness[0], classes)
        minus = self.weights[1] * self.negative.weigh(features, self.sharpness[1], classes)
        return self.scale * features @ text_features.T + plus - minus


@method_dataclass
class TDA(CacheAdapter):
    """100 f·t + α Σ exp(-β (1 - f·f_k)) y_k, minus the same over unsure images.

    y_k is the pseudo-label of a confident image. For an unsure image it marks all classes that it
    may be: most of them are wrong.
    """

    summary = "add and subtract caches of the stream's confident and unsure features; no gradients"
    reference = "Karmanov et al., 2024"

    pos_shot_capacity: PositiveInt = 3  # features per class
    pos_alpha: NonNegativeFloat = 2.0
    pos_beta: NonNegativeFloat = 5.0
    neg_shot_capacity: PositiveInt = 2
    neg_alpha: NonNegativeFloat = 0.117
    neg_beta: NonNegativeFloat = 1.0
    entropy_threshold_lower: NonNegativeFloat = 0.2  # of the negative cache; entropy / log2 C
    entropy_threshold_upper: NonNegativeFloat = 0.5
    mask_threshold_lower: UnitInterval = 0.03  # probability from which a class is marked
    mask_threshold_upper: UnitInterval = 1.0

    def make_head(self) -> TDAHead:
        self.positive = FeatureCache(self.pos_shot_capacity)
        self.negative = FeatureCache(self.neg_shot_capacity)
        weights, sharpness = (self.pos_alpha, self.neg_alpha), (self.pos_beta, self.neg_beta)
        return TDAHead(self.positive, self.negative, weights, sharpness, torch.ones(()))

    def store(self, features: Tensor, logits: Tensor) -> None:
        entropies, labels = entropy(logits), logits.argmax(dim=1)
        classes, probabilities = logits.shape[1], logits.softmax(dim=1)
        self.positive.add(features, labels, entropies, one_hot(labels, classes).bool())
        share = entropies / max(math.log2(classes), 1e-9)  # nats over bits, as in the released code
        unsure = (share > self.entropy_threshold_lower) & (share < self.entropy_threshold_upper)
        marked = probabilities > self.mask_threshold_lower
        marked &= probabilities < self.mask_threshold_upper
        self.negative.add(features[unsure], labels[unsure], entropies[unsure], marked[unsure])

    def clear(self) -> None:
        self.positive.clear()
        self.negative.clear()

    def remove_class(self, index: int) -> None:
        self.positive.remove_class(index)
        self.negative.remove_class(index)

    def state_dict(self) -> Tensors:
        caches = {"positive": self.positive, "negative": self.negative}
        return {f"{c}/{n}": t for c, cache in caches.items() for n, t in cache.state_dict().items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.positive.load_state_dict(select_prefix("positive/", tensors))
        self.negative.load_state_dict(select_prefix("negative/", tensors))
