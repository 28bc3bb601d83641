"""Things kept by the position of a class, when a class goes and those after it move up."""

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


def closed_up(kept: Mapping[int, T], gone: int) -> dict[int, T]:
    return {place - (place > gone): value for place, value in kept.items() if place != gone}


def closed_up_labels(labels: Tensor, gone: int) -> tuple[Tensor, Tensor]:
    """Which of the labels `[n]` stay, as booleans `[n]`, and what those are now."""
    stay = labels != gone
    return stay, labels[stay] - (labels[stay] > gone).long()
