"""The selected entries of one weight, gathered into a small tensor an optimizer can own.

The dense gradient is gathered the moment its layer's backward ends and freed; the optimizer's
state exists for the selected entries only; the new values are scattered back. Entries outside the
mask are never written, so they stay bit-identical whatever the optimizer does.
"""

import weakref

import torch
from torch import Tensor, nn


def mask_indices(mask: Tensor) -> Tensor:
    """Where a mask is True, flat and in order `[K]`, in the smallest integers that do."""
    found = mask.flatten().nonzero().squeeze(1)
    return found.int() if mask.numel() < 2**31 else found


def union_indices(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Positions in one list or the other, in order; None stands for all. Equal lists are one."""
    if one is None or other is None:
        return None
    found = torch.cat([one, other]).unique()
    return next((known for known in (other, one) if len(known) == len(found)), found)


def keep_if_few(found: Tensor | None, numel: int) -> Tensor | None:
    """The positions while they are few; from a quarter on, going through all is no more work."""
    return found if found is not None and len(found) <= numel // 4 else None


class SparseParameter:
    def __init__(self, weight: nn.Parameter, mask: Tensor | None) -> None:
        self.weight = weight
        weight.requires_grad_(True)
        if mask is None or bool(mask.all()):
            self.where, self.values = None, weight
            self._hook = None
        else:
            self.where = mask_indices(mask)  # [K]
            self.values = nn.Parameter(self.gather(weight.detach()))
            # Weakly: the collector does not see through a hook, so a weight that holds us by one
            # would keep itself alive for ever.
            take = weakref.WeakMethod(self._take_gradient)

            def hook(weight: Tensor) -> None:
                if (known := take()) is not None:
                    known(weight)

            self._hook = weight.register_post_accumulate_grad_hook(hook)

    def gather(self, dense: Tensor) -> Tensor:
        """The selected entries of a tensor like the weight `[K]`, or all of it."""
        return dense if self.where is None else dense.reshape(-1)[self.where]

    def spread(self, gathered: Tensor) -> Tensor:
        """The other way: zero outside the selection."""
        if self.where is None:
            return gathered
        dense = torch.zeros_like(self.weight, dtype=gathered.dtype)
        dense.view(-1)[self.where] = gathered
        return dense

    def _take_gradient(self, weight: Tensor) -> None:
        assert weight.grad is not None
        grad = self.gather(weight.grad)
        self.values.grad = grad if self.values.grad is None else self.values.grad + grad
        weight.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the weight anew: somebody may have assigned to it since the last step."""
        if self.where is not None:
            self.values.copy_(self.gather(self.weight))

    @torch.no_grad()
    def scatter(self) -> None:
        if self.where is not None:
            self.weight.view(-1).index_copy_(0, self.where.long(), self.values)

    def release(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self.weight.requires_grad_(False)
        self.weight.grad = None
