"""Where tensors live: a device by name, or one sentence about why it is not to be had."""

import os

import torch
from torch import Tensor

from dosapp.errors import InputError


def available_devices() -> list[str]:
    """The kinds that this machine and this torch have, the fastest first."""
    kinds = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return [kind for kind, there in kinds.items() if there] + ["cpu"]


def resolve_device(name: str) -> torch.device:
    """`cpu`, `cuda`, `cuda:1`, `mps`, or `auto` for the fastest; under torchrun each process has a
    GPU of its own."""
    there = available_devices()
    try:
        found = torch.device(there[0] if name == "auto" else name)
    except RuntimeError as error:
        raise InputError(f"device '{name}' is unknown; use auto or {', '.join(there)}") from error
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    count = torch.cuda.device_count() if found.type == "cuda" else 1
    if found.type not in there or (found.index or 0) >= count:
        raise InputError(f"device '{name}' is not available here; use auto or {', '.join(there)}")
    return found


def to_device(tensor: Tensor, to: torch.device) -> Tensor:
    """There, without waiting for it where that is possible."""
    if to.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(to, non_blocking=True)
