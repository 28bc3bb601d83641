"""The loss CLIP was trained with, which every method starts from, and what some add to it."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax


def clip_loss(images: Tensor, texts: Tensor, scale: Tensor | float) -> Tensor:
    """Symmetric InfoNCE over B pairs of unit features `[B, D]`, targets on the diagonal.

    Equal captions in a batch are each other's negatives, as in FLYP and SPU: with all B captions
    equal the loss is log B. A batch of one has loss zero.
    """
    logits = scale * images @ texts.T  # [B, B]
    target = torch.arange(len(logits), device=logits.device)
    return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2


def distillation(new: Tensor, old: Tensor, temperature: float) -> Tensor:
    """KL(old ‖ new) of softened rows `[B, C]`, summed; no T² factor (LwF as in SPU's code)."""
    return kl_div(
        log_softmax(new / temperature, dim=1), (old / temperature).softmax(dim=1), reduction="sum"
    )


def relation(new: Tensor, old: Tensor, temperature: float) -> Tensor:
    """PRD: per caption, how the batch's images are ranked. Logits are images × captions `[B, B]`.

    Mean over captions of the cross-entropy between the old and the new softmax over images.
    """
    target = (old.T / temperature).softmax(dim=1)
    return cross_entropy(new.T / temperature, target)


def entropy(logits: Tensor) -> Tensor:
    """Of each row's softmax, in nats `[B]`."""
    logs = log_softmax(logits, dim=1)
    return -(logs.exp() * logs).sum(dim=1)
