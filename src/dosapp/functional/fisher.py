"""Fisher information: how much a model's predictions depend on each weight."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dosapp.functional.masks import Weights


def fisher_information(gradients: Iterable[Weights]) -> dict[str, Tensor]:
    """The mean over mini-batches of the squared gradient."""
    total: dict[str, Tensor] = {}
    count = 0
    for by_name in gradients:
        for name, gradient in by_name.items():
            total[name] = total.get(name, torch.zeros_like(gradient)) + gradient.square()
        count += 1
    return {name: squares / count for name, squares in total.items()}


def self_label_losses(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Cross-entropy to a model's own predictions, for batches of logits `[B, C]`."""
    for logits in batches:
        yield cross_entropy(logits, logits.argmax(dim=1))
