"""How a teacher follows a student: one momentum where weights move, another where they do not."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dosapp.functional.masks import Weights


def momentum_tensor(mask: Tensor, *, active: float, frozen: float) -> Tensor:
    """p of Eq. 4, an affine image of the mask: `active` where it is set, `frozen` elsewhere.

    q is 1 - p. With γ as `active` this is the labelled phase, with λ the unlabelled one.
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
    apart: Mapping[str, Tensor] | None = None,
) -> None:
    """θ^T ← p θ^T + q θ^S in place (Eq. 3 and 6); a mask may be one truth for a whole tensor.

    `apart` has the flat positions `[K]` outside which the two are equal, for those tensors where
    that is known: the average of equals is the same, so nothing is computed there.
    """
    for name, weight in teacher.items():
        at = (apart or {}).get(name)
        theirs, mine, where = weight.view(-1), student[name].detach().view(-1), mask[name]
        if isinstance(where, bool):
            q: Tensor | float = 1 - (active if where else frozen)
        else:
            chosen = where.view(-1) if at is None else where.view(-1)[at]
            q = (1 - momentum_tensor(chosen, active=active, frozen=frozen)).to(weight.dtype)
        if at is None:
            theirs.copy_(lerp(theirs, mine, q))
        else:
            theirs.index_copy_(0, at.long(), lerp(theirs[at], mine[at], q))


def lerp(old: Tensor, new: Tensor, q: Tensor | float) -> Tensor:
    """(1 - q) old + q new, from the nearer end, so that both ends and the average of equals are
    exact. Every operation is rounded by itself: a fused one would depend on an entry's neighbours.
    """
    gap = new - old
    if not isinstance(q, Tensor):
        return old + gap * q if q < 0.5 else new - gap * (1 - q)
    return torch.where(q < 0.5, old + gap * q, new - gap * (1 - q))
