"""The loss CLIP was trained with, which every phase of every method here starts from."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def clip_loss(images: Tensor, texts: Tensor, scale: Tensor | float) -> Tensor:
    """Symmetric InfoNCE over B pairs of unit features `[B, D]`, targets on the diagonal.

    Equal captions in a batch are each other's negatives, as in FLYP and SPU: with all B captions
    equal the loss is log B. A batch of one has loss zero.
    """
    logits = scale * images @ texts.T  # [B, B]
    target = torch.arange(len(logits), device=logits.device)
    return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2
