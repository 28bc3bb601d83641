"""Devices by name."""

import os

import torch
from torch import Tensor

from dosapp.errors import InputError


def available_devices() -> list[str]:
    """The types of device that this machine and this torch have, the fastest first."""
    types = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return [name for name, is_available in types.items() if is_available] + ["cpu"]


def resolve_device(name: str) -> torch.device:
    """Turn `cpu`, `cuda`, `cuda:1`, `mps` or `auto` into a device.

    `auto` is the fastest one. Under torchrun each process gets a GPU of its own.

    Raises:
        InputError: There is no such device.
    """
    available = available_devices()
    try:
        device = torch.device(available[0] if name == "auto" else name)
    except RuntimeError as error:
        raise InputError(
            f"device '{name}' is unknown; use auto or {', '.join(available)}"
        ) from error
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if device.type not in available or (device.index or 0) >= count:
        raise InputError(
            f"device '{name}' is not available here; use auto or {', '.join(available)}"
        )
    return device


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, asynchronously if possible."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
