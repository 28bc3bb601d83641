"""Things kept by the position of a class, when a class goes and those after it move up."""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def remove_class_index(kept: Mapping[int, T], gone: int) -> dict[int, T]:
    return {place - (place > gone): value for place, value in kept.items() if place != gone}
