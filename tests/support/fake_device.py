"""A device that is not the CPU, for machines that have no other: `meta`, with real numbers.

Inside `FakeDevice()` a tensor on the device `meta` computes as on the CPU. An operation on tensors
of both devices raises, as it would between a GPU and its host: only scalars (tensors without
dimensions) and indices may come from the CPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
INDEXING = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}


class FakeTensor(Tensor):
    """A tensor on the fake device; its numbers are in `cpu_tensor`."""

    cpu_tensor: Tensor

    @staticmethod
    def __new__(cls, cpu_tensor: Tensor) -> "FakeTensor":
        tensor = Tensor._make_wrapper_subclass(
            cls,
            cpu_tensor.size(),
            strides=cpu_tensor.stride(),
            storage_offset=cpu_tensor.storage_offset(),
            dtype=cpu_tensor.dtype,
            device=DEVICE,
            requires_grad=cpu_tensor.requires_grad,
        )
        tensor.cpu_tensor = cpu_tensor
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with FakeDevice():
            return func(*args, **(kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self) -> Any:
        return self.cpu_tensor.tolist()


class FakeDevice(TorchDispatchMode):
    """Also handles operations that create tensors on the device or copy tensors to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled():  # autograd does not decompose operations here
            with self, torch.inference_mode(False), torch.no_grad():
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        with torch.inference_mode(False), torch.no_grad():
            return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the CPU and put its result on the right device."""
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    has_fake = any(isinstance(t, FakeTensor) for t in tensors)
    target = kwargs.get("device")
    if has_fake and func not in COPIES:
        checked = tree_flatten(args[0])[0] if func in INDEXING else tensors
        on_cpu = [
            t
            for t in checked
            if isinstance(t, Tensor) and t.dim() and not isinstance(t, FakeTensor)
        ]
        if on_cpu and (func not in INDEXING or not isinstance(args[0], FakeTensor)):
            raise RuntimeError(f"{func}: tensors on {DEVICE} and on the CPU")
    is_fake = has_fake if target is None else torch.device(target) == DEVICE
    if func is torch.ops.aten.copy_.default:
        is_fake = isinstance(args[0], FakeTensor)
    cpu_args, cpu_kwargs = tree_map(_to_cpu, (args, dict(kwargs)))
    if target is not None:
        cpu_kwargs["device"] = torch.device("cpu")
    result = func(*cpu_args, **cpu_kwargs)
    if not is_fake:
        return result
    if not has_fake:
        return tree_map(_to_fake, result)
    return return_and_correct_aliasing(func, args, kwargs, tree_map(_to_fake, result))


def _to_cpu(value: Any) -> Any:
    return value.cpu_tensor if isinstance(value, FakeTensor) else value


def _to_fake(value: Any) -> Any:
    is_plain = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
    return FakeTensor(value) if is_plain else value
