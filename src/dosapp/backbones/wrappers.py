"""Backbones around a backbone, and ensembles.

The parameters that a wrapper adds are trained, shared, averaged and saved like all other weights,
so that every method works with every wrapper.
"""

import copy
from collections.abc import Collection, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from dosapp.backbones.base import Backbone, Captions, Expert, Pixels, TowerHooks, Weights
from dosapp.data.preprocess import Preprocess
from dosapp.settings import LearnerSettings

W = TypeVar("W", bound="BackboneWrapper")


class BackboneWrapper:
    """A backbone with added parameters. A subclass overrides how images are encoded.

    Args:
        inner: The wrapped backbone.
        added: Initial values of the added parameters, by name.

    Example:
        >>> from dosapp.backbones.registry import load_backbone
        >>> class Shifted(BackboneWrapper):
        ...     def project_image(self, pooled: Tensor) -> Tensor:
        ...         return super().project_image(pooled + self.added["shift"])
        >>> backbone = Shifted(load_backbone("tiny"), {"shift": torch.zeros(128)})
        >>> backbone.weights()["shift"].shape
        torch.Size([128])
    """

    def __init__(self, inner: Backbone, added: dict[str, Tensor]) -> None:
        self.inner = inner
        device = inner.logit_scale.device
        self.added = {n: nn.Parameter(t.to(device), requires_grad=False) for n, t in added.items()}
        self.name, self.image_size, self.revision = inner.name, inner.image_size, inner.revision
        self.hidden_size, self.num_blocks = inner.hidden_size, inner.num_blocks
        self.embed_dim = inner.embed_dim

    @property
    def logit_scale(self) -> Tensor:
        return self.inner.logit_scale

    @property
    def preprocess(self) -> Preprocess:
        return self.inner.preprocess

    def configure(self, settings: LearnerSettings) -> None:
        self.inner.configure(settings)
        for weight in self.added.values():
            weight.data = weight.data.to(self.inner.logit_scale.device)

    def encode_image(self, pixels: Pixels, hooks: TowerHooks | None = None) -> Tensor:
        return self.project_image(self.pool_image(pixels, hooks))

    def pool_image(self, pixels: Pixels, hooks: TowerHooks | None = None) -> Tensor:
        return self.inner.pool_image(pixels, hooks)

    def project_image(self, pooled: Tensor) -> Tensor:
        return self.inner.project_image(pooled)

    def encode_text(self, captions: Captions) -> Tensor:
        return self.inner.encode_text(captions)

    def encode_image_trunk(self, pixels: Tensor) -> Pixels:
        return self.inner.encode_image_trunk(pixels)

    def encode_text_trunk(self, captions: Sequence[str]) -> Captions:
        return self.inner.encode_text_trunk(captions)

    def weights(self) -> Weights:
        return {**self.inner.weights(), **self.added}

    def own_weights(self) -> Weights:
        return self.inner.own_weights()

    def trunk_weights(self) -> Weights:
        return self.inner.trunk_weights()

    def first_mlp_weights(self) -> Weights:
        return self.inner.first_mlp_weights()

    def spu_extra_weights(self) -> Weights:
        return self.inner.spu_extra_weights()

    def linear_weights(self) -> Weights:
        return self.inner.linear_weights()

    def projection_weights(self) -> Weights:
        return self.inner.projection_weights()

    def image_norm_weights(self) -> Weights:
        return self.inner.image_norm_weights()

    def shared_copy(self: W, unshared: Collection[str] = ()) -> W:
        other = copy.copy(self)
        other.inner = self.inner.shared_copy([name for name in unshared if name not in self.added])
        other.added = dict(self.added)
        other._unshare_added(unshared)
        return other

    def unshare(self, names: Collection[str]) -> None:
        self.inner.unshare([name for name in names if name not in self.added])
        self._unshare_added(names)

    def _unshare_added(self, names: Collection[str]) -> None:
        for name in self.added.keys() & set(names):
            value = self.added[name].detach().clone()
            self.added[name] = nn.Parameter(value, requires_grad=False)

    def fingerprint(self) -> str:
        return self.inner.fingerprint()


def find_wrapper(backbone: Backbone, kind: type[W]) -> W:
    """The wrapper of this kind around a backbone, however deep."""
    while isinstance(backbone, BackboneWrapper):
        if isinstance(backbone, kind):
            return backbone
        backbone = backbone.inner
    raise LookupError(f"no {kind.__name__} in {backbone.name}")


class Ensemble:
    """Two experts as one whose cosine with a caption is the mean of theirs.

    Features are concatenated and divided by √2. (With several templates per class each expert is
    weighted by how well its templates agree.)
    """

    def __init__(self, first: Expert, second: Expert) -> None:
        self.experts = (first, second)
        self.image_size = first.image_size

    @property
    def revision(self) -> int:
        return sum(expert.revision for expert in self.experts)

    @property
    def logit_scale(self) -> Tensor:
        return torch.stack([expert.logit_scale for expert in self.experts]).mean()

    def encode_image(self, pixels: Tensor) -> Tensor:
        return torch.cat([e.encode_image(pixels) for e in self.experts], dim=1) / 2**0.5

    def encode_text(self, captions: Sequence[str]) -> Tensor:
        return torch.cat([e.encode_text(captions) for e in self.experts], dim=1) / 2**0.5

    def weights(self) -> Weights:
        return {}  # none of its own
