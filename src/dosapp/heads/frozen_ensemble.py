"""An ensemble of class Gaussians on a trained model's features and on those of a frozen one.

Trained features separate the learned classes better, but drift; frozen ones never change, so the
means of their Gaussians stay exact. Where training does harm, as on fine-grained classes with few
images, the frozen half limits the loss of accuracy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dosapp.backbones.base import Backbone, Expert, Weights
from dosapp.heads.gaussian import GaussianHead


class PairedExpert:
    """An expert whose image features are followed by those of a frozen copy.

    Args:
        expert: The model that is trained; captions and weights are its own.
        frozen: The pretrained model.
    """

    def __init__(self, expert: Expert, frozen: Backbone) -> None:
        self.expert, self.frozen = expert, frozen
        self.image_size = expert.image_size

    @property
    def revision(self) -> int:
        """Increased whenever a weight changes."""
        return self.expert.revision + self.frozen.revision

    @property
    def logit_scale(self) -> Tensor:
        """That of the trained model."""
        return self.expert.logit_scale

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Features `[B, 2 D]` of images in [0, 1]: two unit vectors each."""
        return torch.cat([self.expert.encode_image(pixels), self.frozen.encode_image(pixels)], 1)

    def encode_text(self, captions: Sequence[str]) -> Tensor:
        """Unit features `[C, D]` of captions, by the trained model."""
        return self.expert.encode_text(captions)

    def weights(self) -> Weights:
        """The trained model's weights by name."""
        return self.expert.weights()


@dataclass
class EnsembleHead:
    """The sum of both log-likelihoods, beside the captions.

    logits = (GDA of trained features + scale · f·t_c + GDA of frozen features) / temperature

    Args:
        trained: Of the trained model's features, with captions.
        frozen: Of the frozen model's features, without.
        temperature: Of the sum.

    Example:
        >>> from dosapp.heads.class_statistics import ClassStatistics
        >>> statistics = ClassStatistics()
        >>> statistics.add_session(torch.eye(2), torch.tensor([0, 1]))
        >>> one = GaussianHead(statistics, torch.tensor(0.0))
        >>> EnsembleHead(one, one).score(torch.ones(1, 4), torch.eye(2)).tolist()
        [[100.0, 100.0]]
    """

    trained: GaussianHead
    frozen: GaussianHead
    temperature: float = 1.0

    def score(self, features: Tensor, text_features: Tensor) -> Tensor:
        """Logits `[B, C]` of paired features `[B, 2 D]`."""
        trained, frozen = features.chunk(2, dim=1)
        scores = self.trained.score(trained, text_features)
        return (scores + self.frozen.score(frozen, text_features)) / self.temperature
