"""Several processes as one learner (`torchrun --nproc-per-node N -m dosapp run …`).

Every process reads the same batch, takes the same decisions and computes the same loss. Only the
work of the towers is shared out: each encodes its rows and all see everybody's features. Gradients
are averaged over processes, on the entries that may move and nothing else. Without torchrun there
is one process and all of this is nothing.
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
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


@contextmanager
def process_group(device: str = "cpu") -> Iterator[None]:
    """Find the others, if torchrun started some; tensors on GPUs do not go through the host."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield
        return
    kind = devices.resolve_device(device)
    if kind.type == "cuda":
        torch.cuda.set_device(kind)
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def rank_folder(folder: Path) -> Iterator[Path]:
    """The first process writes to the folder. The others work on a copy that is thrown away."""
    if world_size() == 1:
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        place = folder if rank() == 0 else Path(scratch) / "run"
        if rank() > 0 and folder.exists():
            shutil.copytree(folder, place)
        began = (place / "run.json").exists()
        if len(set(gather_objects(began))) > 1:  # and nobody goes on before all have their copy
            raise InputError(f"not every process can see '{folder}'; --out must be shared by them")
        yield place


def gather_objects(mine: Any) -> list[Any]:
    """What each process has to say."""
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, mine)
    return found


def encode_sharded(encode: Callable[[Any], Tensor], rows: Any) -> Tensor:
    """`encode(rows)`, of which each process computes its portion; all of it if there are too few
    to give everybody one."""
    if len(rows) < world_size():
        return encode(rows)
    mine = rank_rows(len(rows), rank())
    own = encode(rows[mine.start : mine.stop])
    found: Tensor = _Gathered.apply(own, len(rows))  # type: ignore[no-untyped-call]
    return found


def rank_rows(total: int, who: int) -> range:
    """The rows a process encodes; the first ones have one more if it does not come out even."""
    each, more = divmod(total, world_size())
    first = who * each + min(who, more)
    return range(first, first + each + (who < more))


class _Gathered(torch.autograd.Function):
    """The rows of all processes, in order. Backwards a process keeps its own, times the number of
    processes: averaged afterwards, what was shared out adds up, and what everybody computed alike
    stays as it is."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, total: int) -> Tensor:
        sizes = [len(rank_rows(total, who)) for who in range(world_size())]
        padded = mine.new_zeros(max(sizes), *mine.shape[1:])
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        ctx.mine = rank_rows(total, rank())
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.mine.start : ctx.mine.stop] * world_size(), None


def average_gradients(tensors: Sequence[Tensor]) -> None:
    """In place, the mean over processes, in one message."""
    if world_size() == 1 or not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    flat /= world_size()
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
