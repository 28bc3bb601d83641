"""How much a weight matters to what a model already answers."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dosapp.core.masks import Weights, gradients


def fisher(weights: Weights, batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """Mean over mini-batches of the squared gradient of the likelihood of the model's own labels;
    each batch is its logits `[B, C]`, computed when it is asked for."""
    total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    count = 0
    for found in gradients(weights, _own_labels(batches)) if weights else ():
        for name, grad in found.items():
            total[name] += grad.square()
        count += 1
    return {name: squares / max(1, count) for name, squares in total.items()}


def _own_labels(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    for logits in batches:
        yield cross_entropy(logits, logits.argmax(dim=1))
