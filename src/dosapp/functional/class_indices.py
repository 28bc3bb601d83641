"""Values by class index, when a class is removed."""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def remove_class_index(values: Mapping[int, T], removed: int) -> dict[int, T]:
    """Drop the value of a class and decrease the indices after it by one.

    Example:
        >>> remove_class_index({0: "a", 1: "b", 2: "c"}, 1)
        {0: 'a', 1: 'c'}
    """
    return {index - (index > removed): v for index, v in values.items() if index != removed}
