"""A backbone before any learning, read when it is first asked for. Learners at several states and
their histories share one.
"""

from functools import cached_property

from torch import Tensor

from dosapp.backbones.base import Backbone
from dosapp.backbones.registry import load_backbone
from dosapp.errors import InputError


class PretrainedBackbone:
    def __init__(self, name: str, fingerprint: str, net: Backbone | None = None) -> None:
        self.name, self.fingerprint, self._given = name, fingerprint, net

    @cached_property
    def net(self) -> Backbone:
        net = self._given or load_backbone(self.name)
        found = net.fingerprint()
        if found != self.fingerprint:
            raise InputError(
                f"the learner began from a backbone of fingerprint {self.fingerprint}, but "
                f"'{self.name}' has {found}; use the one it had"
            )
        return net

    def tensor(self, key: str) -> Tensor | None:
        """What a tensor of a state was then: a history's base."""
        role, _, name = key.partition("/")
        if role in ("method", "mask", "caution"):
            return None
        found = self.net.weights().get(name)
        return None if found is None else found.detach().cpu()
