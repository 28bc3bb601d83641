"""Tensors stored as what changed in them since an older set of tensors.

Names are `role/weight`. The roles of one weight (student, teacher, scores) usually change in the
same entries and share one bit mask. A delta has, for each key K, a role of the weight W, that
changed:

    values/K    the new entries where bits/W is set, in the order of the bits; shape/K
    dense/K     the whole tensor
    packed/K    a whole boolean tensor, eight entries in a byte; shape/K

bits/W is packed too. gone/ has the names of the keys that the new set lacks, in UTF-8, one a line.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from dosapp.functional.named_tensors import bits_differ

BaseTensor = Callable[[str], Tensor | None]  # a tensor before anything was stored, by key


def compute_delta(
    new: Mapping[str, Tensor], old: Mapping[str, Tensor], base: BaseTensor = lambda key: None
) -> dict[str, Tensor]:
    """What turns `old` into `new`, in the smaller of the sparse and the dense form.

    Args:
        new: Tensors to store.
        old: Tensors that are stored already.
        base: Gives the tensor that a key missing in `old` is compared with; zeros if None.

    Returns:
        The delta, named as described above.
    """
    delta: dict[str, Tensor] = {}
    groups: dict[tuple[str, torch.Size], list[str]] = {}
    for key, tensor in new.items():
        before = old.get(key)
        same_shape = before is not None and before.shape == tensor.shape
        if before is not None and same_shape and not bits_differ(before, tensor).any():
            continue
        if tensor.dtype == torch.bool:
            delta[f"packed/{key}"] = _pack_bits(tensor)
            delta[f"shape/{key}"] = torch.tensor(tensor.shape)
        elif tensor.is_floating_point() and (before is None or same_shape):
            groups.setdefault((_weight_name(key), tensor.shape), []).append(key)
        else:
            delta[f"dense/{key}"] = tensor
    for (weight, shape), keys in groups.items():
        changed = torch.zeros(shape, dtype=torch.bool)
        for key in keys:
            changed |= bits_differ(new[key], _tensor_before(key, new[key], old, base))
        sparse_size = len(keys) * int(changed.sum()) + changed.numel() / 32  # in floats
        is_taken = f"bits/{weight}" in delta  # by a tensor of this name with another shape
        if is_taken or sparse_size >= len(keys) * changed.numel():
            delta |= {f"dense/{key}": new[key] for key in keys}
            continue
        delta[f"bits/{weight}"] = _pack_bits(changed)
        for key in keys:
            delta[f"values/{key}"] = new[key][changed]
            delta[f"shape/{key}"] = torch.tensor(shape)
    gone = sorted(set(old) - set(new))
    if gone:
        delta["gone/"] = torch.tensor(list("\n".join(gone).encode()), dtype=torch.uint8)
    return delta


def apply_delta(
    delta: Mapping[str, Tensor], old: Mapping[str, Tensor], base: BaseTensor = lambda key: None
) -> dict[str, Tensor]:
    """Apply a delta: `apply_delta(compute_delta(new, old), old)` equals `new` bit for bit.

    Raises:
        KeyError, IndexError, TypeError, ValueError: It does not fit `old`.
    """
    result = dict(old)
    if "gone/" in delta:
        for key in bytes(delta["gone/"].tolist()).decode().split("\n"):
            del result[key]
    for path, value in delta.items():
        kind, _, key = path.partition("/")
        if kind == "dense":
            result[key] = value.clone()
        elif kind == "packed":
            result[key] = _unpack_bits(value, delta[f"shape/{key}"])
        elif kind == "values":
            changed = _unpack_bits(delta[f"bits/{_weight_name(key)}"], delta[f"shape/{key}"])
            like = torch.empty(changed.shape, dtype=value.dtype)
            tensor = _tensor_before(key, like, old, base).clone()
            expected = (tensor.dtype, (int(changed.sum()),))
            if tensor.shape != changed.shape or (value.dtype, tuple(value.shape)) != expected:
                raise ValueError(f"the new values of '{key}' do not fit {list(tensor.shape)}")
            tensor[changed] = value
            result[key] = tensor
    return result


def _weight_name(key: str) -> str:
    """`student/x` and `method/best/x` are roles of the weight x."""
    return key.rpartition("/")[2]


def _tensor_before(key: str, like: Tensor, old: Mapping[str, Tensor], base: BaseTensor) -> Tensor:
    before = old[key] if key in old else base(key)
    return torch.zeros_like(like) if before is None else before


def _pack_bits(mask: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1)))


def _unpack_bits(bits: Tensor, shape: Tensor) -> Tensor:
    sizes = [int(n) for n in shape.tolist()]
    count = math.prod(sizes)  # exact, however large
    if min(sizes, default=0) < 0 or bits.ndim != 1 or len(bits) != -(-count // 8):
        raise ValueError(f"{bits.numel()} bytes of bits do not have the shape {sizes[:8]}")
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=count)).bool().view(sizes)
