"""How far a stream is from showing its classes equally often."""

import math

from torch import Tensor


def class_skew(counts: Tensor) -> float:
    """1 - entropy / its maximum, of counts `[C]`: 0 when all are equal, 1 when one has everything.

    n answers fill at most n classes, so with fewer answers than classes the maximum is ln n.
    """
    total = counts.sum().item()
    most = math.log(min(len(counts), max(total, 1.0))) if len(counts) else 0.0
    if most <= 0:
        return 0.0
    share = counts[counts > 0] / total
    return min(1.0, max(0.0, 1 - float(-(share * share.log()).sum()) / most))
