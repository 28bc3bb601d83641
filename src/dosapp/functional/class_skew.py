"""How far a stream is from showing its classes equally often."""

import math

from torch import Tensor


def class_skew(counts: Tensor) -> float:
    """1 - entropy / maximal entropy of label counts `[C]`: 0 if all are equal, 1 for one class.

    n labels fill at most n classes, so with fewer labels than classes the maximum is ln n.

    Example:
        >>> import torch
        >>> class_skew(torch.tensor([9.0, 0.0, 0.0]))
        1.0
    """
    total = counts.sum().item()
    maximum = math.log(min(len(counts), max(total, 1.0))) if len(counts) else 0.0
    if maximum <= 0:
        return 0.0
    shares = counts[counts > 0] / total
    return min(1.0, max(0.0, 1 - float(-(shares * shares.log()).sum()) / maximum))
