"""How much a weight matters to what a model already answers."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dosapp.functional.masks import Weights


def fisher_information(gradients: Iterable[Weights]) -> dict[str, Tensor]:
    """Mean over mini-batches of the squared gradient."""
    total: dict[str, Tensor] = {}
    count = 0
    for found in gradients:
        for name, grad in found.items():
            total[name] = total.get(name, torch.zeros_like(grad)) + grad.square()
        count += 1
    return {name: squares / count for name, squares in total.items()}


def self_label_losses(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """How unlikely a model finds its own labels; a batch is its logits `[B, C]`."""
    for logits in batches:
        yield cross_entropy(logits, logits.argmax(dim=1))
