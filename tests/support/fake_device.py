"""A device that is not the CPU, for machines that have no other: `meta` with numbers behind it.

Inside `Elsewhere()` a tensor on the device `meta` computes as on the CPU. What has tensors of
both devices is refused, as it would be between a GPU and its host: only numbers (tensors without
dimensions) and indices may come from the CPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
CROSSING = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
INDEXED = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}


class Away(Tensor):
    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> "Away":
        made = Tensor._make_wrapper_subclass(
            cls,
            here.size(),
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=DEVICE,
            requires_grad=here.requires_grad,
        )
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with Elsewhere():
            return func(*args, **(kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self) -> Any:
        return self.here.tolist()


class Elsewhere(TorchDispatchMode):
    """Also what is made or moved there, without a tensor that was there before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled():  # what autograd would have taken apart is whole here
            with self, torch.inference_mode(False), torch.no_grad():
                found = func.decompose(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        with torch.inference_mode(False), torch.no_grad():
            return computed(func, args, kwargs or {})


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    flat = tree_flatten((args, kwargs))[0]
    tensors = [t for t in flat if isinstance(t, Tensor)]
    away = any(isinstance(t, Away) for t in tensors)
    target = kwargs.get("device")
    if away and func not in CROSSING:
        looked = tree_flatten(args[0])[0] if func in INDEXED else tensors
        strangers = [
            t for t in looked if isinstance(t, Tensor) and t.dim() and not isinstance(t, Away)
        ]
        if strangers and (func not in INDEXED or not isinstance(args[0], Away)):
            raise RuntimeError(f"{func}: tensors on {DEVICE} and on the CPU")
    there = away if target is None else torch.device(target) == DEVICE
    if func is torch.ops.aten.copy_.default:
        there = isinstance(args[0], Away)
    plain_args, plain = tree_map(_here, (args, dict(kwargs)))
    if target is not None:
        plain["device"] = torch.device("cpu")
    found = func(*plain_args, **plain)
    if not there:
        return found
    if not away:
        return tree_map(_away, found)
    return return_and_correct_aliasing(func, args, kwargs, tree_map(_away, found))


def _here(value: Any) -> Any:
    return value.here if isinstance(value, Away) else value


def _away(value: Any) -> Any:
    return Away(value) if isinstance(value, Tensor) and not isinstance(value, Away) else value
