"""How far two states of a learner are apart, tensor by tensor."""

from dataclasses import dataclass

import torch

from dosapp.functional.named_tensors import bits_differ
from dosapp.history.delta import BaseTensor
from dosapp.history.record import State


@dataclass(frozen=True)
class TensorDiff:
    """How far a tensor is from another version of it."""

    name: str  # role/weight
    entries: int  # that differ
    of: int
    distance: float  # L2
    largest: float  # of an entry


def diff_states(new: State, old: State, base: BaseTensor) -> list[TensorDiff]:
    """The tensors in which two states differ, largest distance first."""
    diffs = []
    for name in {**new.tensors, **old.tensors}:
        after, before = (state.tensors.get(name, base(name)) for state in (new, old))
        like = before if after is None else after
        assert like is not None  # one of the states has it
        now, then = (torch.zeros_like(like) if t is None else t for t in (after, before))
        if now.shape != then.shape:  # every entry counts as changed
            now, then = now.double(), torch.zeros_like(now, dtype=torch.float64)
        differs = bits_differ(now, then)
        if differs.any():
            gap = (now.double() - then.double())[differs]
            distance, largest = float(gap.norm()), float(gap.abs().max())
            diffs.append(TensorDiff(name, int(differs.sum()), now.numel(), distance, largest))
    return sorted(diffs, key=lambda diff: -diff.distance)
