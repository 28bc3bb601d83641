"""How a teacher follows a student: one momentum where weights move, another where they do not."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dosapp.core.masks import Weights


def momentum(mask: Tensor, *, active: float, frozen: float) -> Tensor:
    """p of Eq. 4, an affine image of the mask: `active` where it is set, `frozen` elsewhere.

    q is 1 - p. With γ as `active` this is the labelled phase, with λ the unlabelled one.
    """
    return (active - frozen) * mask.float() + frozen


@torch.no_grad()
def smooth(
    teacher: Weights,
    student: Weights,
    mask: Mapping[str, Tensor | bool],
    *,
    active: float,
    frozen: float,
) -> None:
    """θ^T ← p θ^T + q θ^S in place (Eq. 3 and 6); a mask may be one truth for a whole tensor."""
    for name, weight in teacher.items():
        where = mask[name]
        if isinstance(where, bool):
            weight.lerp_(student[name], 1 - (active if where else frozen))
        else:
            q = 1 - momentum(where, active=active, frozen=frozen)
            weight.lerp_(student[name], q.to(weight.dtype))
