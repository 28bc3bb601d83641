"""OGA: Gaussians of the stream's confident features beside CLIP's zero-shot prediction.

The published method starts from captions. Here the Gaussians start from the labelled sessions: the
features of their images, as a GDA head stores them, and those that the stream's cache holds now are
one set of statistics.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import one_hot

from dosapp.functional.losses import entropy
from dosapp.functional.named_tensors import select_prefix
from dosapp.heads.class_statistics import ClassStatistics
from dosapp.heads.feature_cache import FeatureCache
from dosapp.heads.gaussian import GaussianHead
from dosapp.methods.base import Tensors, method_dataclass
from dosapp.methods.cache_adapter import CacheAdapter
from dosapp.scenario import Session
from dosapp.student.student import Student

BATCH_SIZE = 64  # images per forward pass for the statistics


@dataclass
class OGAHead:
    """log(ŷ · N^τ), up to a constant per image: ŷ of the captions, N of the Gaussians."""

    gaussians: GaussianHead
    tau: float
    scale: Tensor

    def score(self, features: Tensor, text_features: Tensor) -> Tensor:
        """Logits `[B, C]`."""
        likelihood = self.gaussians.score(features, text_features)
        return self.scale * features @ text_features.T + self.tau * likelihood


@method_dataclass
class OGA(CacheAdapter):
    """p ∝ ŷ · exp(τ log N(f; μ_c, Σ))."""

    summary = "Gaussians of labelled and of confident stream features; no gradients"
    reference = "Fuchs et al., 2025"

    shot_capacity: PositiveInt = 8  # features of lowest entropy per class
    tau: NonNegativeFloat = 0.05  # τ

    def make_head(self) -> OGAHead:
        self.labelled = ClassStatistics()  # of all sessions' images
        self.cache = FeatureCache(self.shot_capacity)
        none = torch.zeros(())  # the captions are the outer head's
        return OGAHead(GaussianHead(self.labelled, none), self.tau, torch.ones(()))

    def check_session(self, student: Student, session: Session) -> None:
        session.check_images("oga has no statistics of it")

    @torch.no_grad()
    def end_session(self, student: Student, session: Session) -> None:
        batches = session.train.batches(BATCH_SIZE)
        features = torch.cat([student.backbone.encode_image(pixels) for pixels in batches])
        indices = torch.tensor([student.classes.index(name) for name in session.classes])
        labels = indices[torch.from_numpy(session.train.labels)]
        self.labelled.add_session(features, labels)
        self._update_head()

    def store(self, features: Tensor, logits: Tensor) -> None:
        labels = logits.argmax(dim=1)
        values = one_hot(labels, logits.shape[1]).bool()
        self.cache.add(features, labels, entropy(logits), values)
        self._update_head()

    def _update_head(self) -> None:
        """Labelled and cached features together."""
        statistics = deepcopy(self.labelled)
        if len(self.cache):
            statistics.add_session(self.cache.features.cpu(), self.cache.labels.cpu())
        head = self.expert.head
        assert isinstance(head, OGAHead)
        head.gaussians = GaussianHead(statistics, torch.zeros(()))

    def clear(self) -> None:
        if len(self.cache):
            self.cache.clear()
            self._update_head()

    def remove_class(self, index: int) -> None:
        self.labelled.remove_class(index)
        self.cache.remove_class(index)
        self._update_head()

    def state_dict(self) -> Tensors:
        labelled = {f"labelled/{name}": t for name, t in self.labelled.state_dict().items()}
        return labelled | {f"cache/{name}": t for name, t in self.cache.state_dict().items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.labelled.load_state_dict(select_prefix("labelled/", tensors))
        self.cache.load_state_dict(select_prefix("cache/", tensors))
        self._update_head()
