"""The selected entries of one weight as a small tensor that an optimizer can own.

The dense gradient is gathered and freed as soon as the weight's backward has run. The optimizer's
state exists for the selected entries only, and new values are scattered back. Entries outside the
mask are never written, so they stay bit-identical whatever the optimizer does.
"""

import weakref

import torch
from torch import Tensor, nn


def mask_indices(mask: Tensor) -> Tensor:
    """Flat indices `[K]` where a mask is True, in the smallest sufficient integer type."""
    indices = mask.flatten().nonzero().squeeze(1)
    return indices.int() if mask.numel() < 2**31 else indices


def union_indices(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The sorted union of two index lists; None stands for all entries.

    A list that already is the union is returned as it is, so that equal lists share their storage.
    """
    if first is None or second is None:
        return None
    union = torch.cat([first, second]).unique()
    return next((known for known in (second, first) if len(known) == len(union)), union)


def none_if_dense(indices: Tensor | None, numel: int) -> Tensor | None:
    """The indices; None above a quarter of all entries, where a dense pass costs no more."""
    return indices if indices is not None and len(indices) <= numel // 4 else None


class SparseParameter:
    """The trainable entries of a weight.

    Attributes:
        weight: The dense weight.
        indices: Flat indices `[K]` of the selected entries; None if all are selected.
        values: The parameter that the optimizer updates, `[K]`, or the weight itself.
    """

    def __init__(self, weight: nn.Parameter, mask: Tensor | None) -> None:
        self.weight = weight
        weight.requires_grad_(True)
        if mask is None or bool(mask.all()):
            self.indices, self.values = None, weight
            self._hook = None
        else:
            self.indices = mask_indices(mask)
            self.values = nn.Parameter(self.gather(weight.detach()))
            # A weak reference: the garbage collector does not see through a hook, so a weight that
            # holds this object by one would never be freed.
            take_gradient = weakref.WeakMethod(self._take_gradient)

            def hook(weight: Tensor) -> None:
                if (method := take_gradient()) is not None:
                    method(weight)

            self._hook = weight.register_post_accumulate_grad_hook(hook)

    def gather(self, dense: Tensor) -> Tensor:
        """The selected entries `[K]` of a tensor shaped like the weight."""
        return dense if self.indices is None else dense.reshape(-1)[self.indices]

    def to_dense(self, gathered: Tensor) -> Tensor:
        """The inverse of `gather`, with zeros outside the selection."""
        if self.indices is None:
            return gathered
        dense = torch.zeros_like(self.weight, dtype=gathered.dtype)
        dense.view(-1)[self.indices] = gathered
        return dense

    def _take_gradient(self, weight: Tensor) -> None:
        """Gather the dense gradient and free it."""
        assert weight.grad is not None
        grad = self.gather(weight.grad)
        self.values.grad = grad if self.values.grad is None else self.values.grad + grad
        weight.grad = None

    @torch.no_grad()
    def read_from_weight(self) -> None:
        """Read the values from the weight, which may have been assigned since the last step."""
        if self.indices is not None:
            self.values.copy_(self.gather(self.weight))

    @torch.no_grad()
    def write_to_weight(self) -> None:
        """Write the values to the weight."""
        if self.indices is not None:
            self.weight.view(-1).index_copy_(0, self.indices.long(), self.values)

    def stop_training(self) -> None:
        """Stop training the weight."""
        if self._hook is not None:
            self._hook.remove()
        self.weight.requires_grad_(False)
        self.weight.grad = None
