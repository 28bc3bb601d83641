"""Operations on tensors by name."""

from collections.abc import Mapping

import torch
from torch import Tensor


def select_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names start with a prefix, under their names without it.

    Example:
        >>> select_prefix("teacher/", {"teacher/w": torch.ones(1), "mask/w": torch.ones(1)})
        {'w': tensor([1.])}
    """
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def bits_differ(a: Tensor, b: Tensor) -> Tensor:
    """Where the bits of two tensors differ: 0.0 and -0.0 do, equal NaNs do not."""
    if not a.is_floating_point():
        return a != b
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.contiguous().view(bits) != b.contiguous().view(bits)
