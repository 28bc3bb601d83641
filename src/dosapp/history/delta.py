"""Tensors stored as what changed in them since an older set."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from dosapp.functional.named_tensors import bits_differ

BaseTensors = Callable[[str], Tensor | None]  # what a tensor was before anything was stored


def compute_delta(
    new: Mapping[str, Tensor], old: Mapping[str, Tensor], base: BaseTensors = lambda key: None
) -> dict[str, Tensor]:
    """What turns `old` into `new`: a bit per entry and the new values where they differ.

    Names are `role/weight`; roles of one weight (student, teacher, scores) usually change in the
    same places and share their bits. A tensor `old` lacks is compared with the base, or with zeros;
    booleans are packed, and whatever would be smaller whole is stored whole. Of a key K, a role of
    the weight W, there is one of these, or nothing if it is as before:

        values/K    the new entries where bits/W says so, in the order of the bits; shape/K
        dense/K     all of it
        packed/K    all of it, eight booleans in a byte; shape/K

    bits/W are packed too, and shared by all values of the weight. gone/ has the names of the keys
    that `new` lacks, in UTF-8, one a line.
    """
    result: dict[str, Tensor] = {}
    groups: dict[tuple[str, torch.Size], list[str]] = {}
    for key, tensor in new.items():
        before = old.get(key)
        if (
            before is not None
            and before.shape == tensor.shape
            and not bits_differ(before, tensor).any()
        ):
            continue
        if tensor.dtype == torch.bool:
            result[f"packed/{key}"] = _pack(tensor)
            result[f"shape/{key}"] = torch.tensor(tensor.shape)
        elif tensor.is_floating_point() and (before is None or before.shape == tensor.shape):
            groups.setdefault((_weight(key), tensor.shape), []).append(key)
        else:
            result[f"dense/{key}"] = tensor
    for (name, shape), keys in groups.items():
        moved = torch.zeros(shape, dtype=torch.bool)
        for key in keys:
            moved |= bits_differ(new[key], _before(key, new[key], old, base))
        stored = len(keys) * int(moved.sum())  # values, against bits for each entry
        taken = f"bits/{name}" in result  # by a tensor of this name with another shape
        if taken or stored + moved.numel() / 32 >= len(keys) * moved.numel():
            result |= {f"dense/{key}": new[key] for key in keys}
            continue
        result[f"bits/{name}"] = _pack(moved)
        for key in keys:
            result[f"values/{key}"] = new[key][moved]
            result[f"shape/{key}"] = torch.tensor(shape)
    gone = sorted(set(old) - set(new))
    if gone:
        result["gone/"] = torch.tensor(list("\n".join(gone).encode()), dtype=torch.uint8)
    return result


def apply_delta(
    changed: Mapping[str, Tensor], old: Mapping[str, Tensor], base: BaseTensors = lambda key: None
) -> dict[str, Tensor]:
    """Apply a delta: `apply_delta(compute_delta(new, old), old)` equals `new` bit for bit."""
    result = dict(old)
    if "gone/" in changed:
        for key in bytes(changed["gone/"].tolist()).decode().split("\n"):
            del result[key]
    for path, value in changed.items():
        kind, _, key = path.partition("/")
        if kind == "dense":
            result[key] = value.clone()
        elif kind == "packed":
            result[key] = _unpack(value, changed[f"shape/{key}"])
        elif kind == "values":
            moved = _unpack(changed[f"bits/{_weight(key)}"], changed[f"shape/{key}"])
            like = torch.empty(moved.shape, dtype=value.dtype)
            whole = _before(key, like, old, base).clone()
            whole[moved] = value
            result[key] = whole
    return result


def _weight(key: str) -> str:
    """`student/x` and `method/best/x` are roles of the weight x."""
    return key.rpartition("/")[2]


def _before(key: str, like: Tensor, old: Mapping[str, Tensor], base: BaseTensors) -> Tensor:
    found = old[key] if key in old else base(key)
    return torch.zeros_like(like) if found is None else found


def _pack(mask: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1)))


def _unpack(bits: Tensor, shape: Tensor) -> Tensor:
    size = torch.Size(shape.tolist())
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=size.numel())).bool().view(size)
