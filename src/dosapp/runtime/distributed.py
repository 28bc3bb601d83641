"""Several processes that train one learner (`torchrun --nproc-per-node N -m dosapp run …`).

Every process reads the same batch and computes the same loss. Only the encoders' work is shared:
each process encodes its rows, and all get the features of every row. Gradients of the trainable
entries are averaged over processes. Without torchrun there is one process and nothing to do.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dosapp.errors import InputError
from dosapp.runtime import devices


def world_size() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


@contextmanager
def process_group(device: str = "cpu") -> Iterator[None]:
    """Join the other processes that torchrun started, if there are any."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield
        return
    resolved = devices.resolve_device(device)
    if resolved.type == "cuda":
        torch.cuda.set_device(resolved)
    dist.init_process_group("cpu:gloo,cuda:nccl" if resolved.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def rank_folder(folder: Path) -> Iterator[Path]:
    """The folder for the first process; for each other one a temporary copy of it."""
    if world_size() == 1:
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        own = folder if rank() == 0 else Path(scratch) / "run"
        if rank() > 0 and folder.exists():
            shutil.copytree(folder, own)
        was_started = (own / "run.json").exists()
        if len(set(gather_objects(was_started))) > 1:  # also a barrier until all have their copy
            raise InputError(f"not every process can see '{folder}'; --out must be shared by them")
        yield own


def gather_objects(value: Any) -> list[Any]:
    """The values of all processes, by rank."""
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def encode_in_parallel(encode: Callable[[Any], Tensor], rows: Any) -> Tensor:
    """`encode(rows)`, of which each process computes a part; all of it if there are too few."""
    if len(rows) < world_size():
        return encode(rows)
    own = rank_rows(len(rows), rank())
    features = encode(rows[own.start : own.stop])
    gathered: Tensor = _AllGather.apply(features, len(rows))  # type: ignore[no-untyped-call]
    return gathered


def rank_rows(total: int, rank: int) -> range:
    """The rows that a process encodes; the first processes have one more if it does not divide."""
    each, more = divmod(total, world_size())
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


class _AllGather(torch.autograd.Function):
    """Concatenate the rows of all processes.

    In the backward pass a process keeps the gradient of its own rows, times the number of
    processes: after averaging, shared work adds up and what all computed alike is unchanged.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, total: int) -> Tensor:
        sizes = [len(rank_rows(total, r)) for r in range(world_size())]
        padded = own.new_zeros(max(sizes), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        ctx.own = rank_rows(total, rank())
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.own.start : ctx.own.stop] * world_size(), None


def average_gradients(tensors: Sequence[Tensor]) -> None:
    """Replace tensors by their mean over processes, in one message."""
    if world_size() == 1 or not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    flat /= world_size()
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
