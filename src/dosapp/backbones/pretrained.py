"""The pretrained backbone, before the first session, loaded when it is first needed.

Learners at several versions and their histories share one.
"""

from functools import cached_property

from torch import Tensor

from dosapp.backbones.base import Backbone
from dosapp.backbones.registry import load_backbone
from dosapp.errors import InputError


class PretrainedBackbone:
    """A backbone by name, whose fingerprint is checked when it is loaded."""

    def __init__(self, name: str, fingerprint: str, backbone: Backbone | None = None) -> None:
        self.name, self.fingerprint, self._given = name, fingerprint, backbone

    @cached_property
    def backbone(self) -> Backbone:
        """The loaded backbone; its weights must not be changed."""
        backbone = self._given or self._load()
        fingerprint = backbone.fingerprint()
        if fingerprint != self.fingerprint:
            raise InputError(
                f"the learner was trained from a backbone with fingerprint {self.fingerprint}, "
                f"but '{self.name}' has {fingerprint}; use the original one"
            )
        return backbone

    def _load(self) -> Backbone:
        try:
            return load_backbone(self.name)
        except InputError as error:
            raise InputError(
                f"{error}; if the learner's backbone moved, give its place with --backbone"
            ) from error

    def initial_tensor(self, key: str) -> Tensor | None:
        """A tensor of a learner's state before any training: the base of its history."""
        role, _, name = key.partition("/")
        if role in ("method", "mask", "caution"):
            return None
        weight = self.backbone.weights().get(name)
        return None if weight is None else weight.detach().cpu()
