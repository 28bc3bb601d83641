"""The teacher's exponential moving average with two momenta (Eq. 3, 4 and 6)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dosapp.functional.masks import Weights


def momentum_tensor(mask: Tensor, *, active: float, frozen: float) -> Tensor:
    """p of Eq. 4: `active` where the mask is True, `frozen` elsewhere; q is 1 - p.

    `active` is γ in the labelled phase and λ in the unlabelled one; `frozen` is δ.
    """
    return (active - frozen) * mask.float() + frozen


@torch.no_grad()
def ema_update(
    teacher: Weights,
    student: Weights,
    mask: Mapping[str, Tensor | bool],
    *,
    active: float,
    frozen: float,
    differing: Mapping[str, Tensor] | None = None,
) -> None:
    """θ^T ← p θ^T + q θ^S in place (Eq. 3 and 6).

    Args:
        teacher: Weights to update.
        student: Weights to follow, by the same names.
        mask: For each weight, which entries train; a bool stands for the whole weight.
        active: Momentum of the entries that train.
        frozen: Momentum of the others.
        differing: Flat indices `[K]` outside which teacher and student are equal, for the weights
            where that is known; nothing is computed there.
    """
    for name, weight in teacher.items():
        indices = (differing or {}).get(name)
        old, new = weight.view(-1), student[name].detach().view(-1)
        weight_mask = mask[name]
        if isinstance(weight_mask, bool):
            q: Tensor | float = 1 - (active if weight_mask else frozen)
        else:
            flat = weight_mask.view(-1)
            flat = flat if indices is None else flat[indices]
            q = (1 - momentum_tensor(flat, active=active, frozen=frozen)).to(weight.dtype)
        if indices is None:
            old.copy_(lerp(old, new, q))
        else:
            old.index_copy_(0, indices.long(), lerp(old[indices], new[indices], q))


def lerp(old: Tensor, new: Tensor, q: Tensor | float) -> Tensor:
    """(1 - q) old + q new, exact at both ends and for equal tensors.

    It starts from the nearer end. Every operation is rounded by itself, because a fused one would
    depend on an entry's neighbours.
    """
    gap = new - old
    if not isinstance(q, Tensor):
        return old + gap * q if q < 0.5 else new - gap * (1 - q)
    return torch.where(q < 0.5, old + gap * q, new - gap * (1 - q))
