"""Drift of class means, estimated from unlabelled images by a kernel around each mean."""

import torch
from torch import Tensor

KERNEL = 2.0  # κ


def kernel_weights(features: Tensor, means: Tensor) -> Tensor:
    """w_c(x) = exp(-κ ‖f(x) - μ_c‖² / σ²), a weight of image x for the mean of class c.

    σ² is the median over images of the squared distance to the nearest mean.

    Args:
        features: Features of images `[B, D]`.
        means: Class means `[C, D]`.

    Returns:
        Weights `[B, C]`, not normalised; never all zero for a class.

    Example:
        >>> kernel_weights(torch.tensor([[0.0], [3.0]]), torch.tensor([[1.0]])).round(decimals=2)
        tensor([[0.1400],
                [0.0000]])
    """
    distances = torch.cdist(features, means).square()
    width = distances.min(dim=1).values.median().clamp(min=1e-12)
    # At least the smallest positive number, so that a far class follows its nearest images.
    return (-KERNEL * distances / width).exp().clamp(min=torch.finfo(features.dtype).tiny)


def merge_drift(
    drift: Tensor, seen: Tensor, weights: Tensor, old: Tensor, before: Tensor, after: Tensor
) -> tuple[Tensor, Tensor]:
    """Add this step's own drift, then average with the drift that the batch shows.

    Args:
        drift: D_c so far `[C, D]`.
        seen: Sum of the weights of earlier images `[C]`.
        weights: Of this batch `[B, C]`.
        old: Features of the batch before the session `[B, D]`.
        before: The same before this step.
        after: The same after it.

    Returns:
        The new drift and sum of weights.
    """
    total = weights.sum(dim=0)  # [C]
    drift = drift + (weights / total).T @ (after - before)
    observed = weights.T @ (after - old)  # [C, D], a weighted sum
    drift = (seen[:, None] * drift + observed) / (seen + total)[:, None]
    return drift, seen + total
