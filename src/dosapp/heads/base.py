"""Heads: an expert may score image features itself, instead of comparing them with captions."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dosapp.backbones.base import Expert, Weights


class Head(Protocol):
    """Scores of image features over the known classes."""

    def score(self, features: Tensor, text_features: Tensor) -> Tensor:
        """Logits `[B, C]`, ready for a softmax.

        Args:
            features: Unit features of images `[B, D]`.
            text_features: Unit features of the known classes' captions `[C, D]`.
        """


class HeadExpert:
    """A model whose image features a head scores.

    Args:
        encoder: The model that encodes.
        head: What scores its image features.
    """

    def __init__(self, encoder: Expert, head: Head) -> None:
        self.encoder, self.head = encoder, head
        self.image_size = encoder.image_size

    @property
    def revision(self) -> int:
        """Increased whenever a weight changes."""
        return self.encoder.revision

    @property
    def logit_scale(self) -> Tensor:
        """One: a head's scores are logits already."""
        return torch.ones_like(self.encoder.logit_scale)

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Unit features `[B, D]` of images in [0, 1]."""
        return self.encoder.encode_image(pixels)

    def encode_text(self, captions: Sequence[str]) -> Tensor:
        """Unit features `[C, D]` of captions."""
        return self.encoder.encode_text(captions)

    def weights(self) -> Weights:
        """All weights by name."""
        return self.encoder.weights()


def score_with_expert(expert: Expert, features: Tensor, text_features: Tensor) -> Tensor:
    """Scores `[B, C]` of image features over all known classes, to be multiplied by `logit_scale`.

    Args:
        expert: The model that encoded both.
        features: Unit features of images `[B, D]`.
        text_features: Unit features of the classes' captions `[C, D]`.

    Returns:
        Cosines, or the logits of the expert's head.
    """
    if isinstance(expert, HeadExpert):
        return expert.head.score(features, text_features)
    # A paired expert's features end with those of a frozen model, which has no captions.
    return features[:, : text_features.shape[1]] @ text_features.T
