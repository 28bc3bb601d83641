"""Which weights train: names, and a mask inside each weight."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dosapp.functional.masks import Mask, Scores


@dataclass(frozen=True)
class Selection:
    """The weights that an optimizer step may change.

    Example:
        >>> Selection(names=("visual_projection.weight",)).mask is None
        True
    """

    names: tuple[str, ...] = ()  # of weights
    mask: Mask | None = None  # entries of each weight; a weight without a mask trains whole
    scores: Scores | None = None  # what the mask was selected by
    lr_scales: Mapping[str, float] = field(default_factory=dict)  # by name, times the learning rate
