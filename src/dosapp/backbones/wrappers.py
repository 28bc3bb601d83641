"""Parameters beside a backbone (prompts, side networks), and two experts that answer as one.

`BackboneWrapper` is a backbone around another. What it holds is trained, shared with twins, smoothed and
saved like any other weight, so every method works with every addition.
"""

import copy
from collections.abc import Collection, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from dosapp.backbones.base import Backbone, Captions, Expert, Pixels, TowerHooks, Weights
from dosapp.data.preprocess import Preprocess
from dosapp.settings import LearnerSettings

A = TypeVar("A", bound="BackboneWrapper")


class BackboneWrapper:
    """The inner backbone with more parameters. A subclass says what they do to a picture."""

    def __init__(self, inner: Backbone, extra: dict[str, Tensor]) -> None:
        self.inner = inner
        device = inner.logit_scale.device
        self.extra = {n: nn.Parameter(t.to(device), requires_grad=False) for n, t in extra.items()}
        self.name, self.image_size, self.revision = inner.name, inner.image_size, inner.revision
        self.hidden_size, self.num_blocks, self.embed_dim = (
            inner.hidden_size,
            inner.num_blocks,
            inner.embed_dim,
        )

    @property
    def logit_scale(self) -> Tensor:
        return self.inner.logit_scale

    def configure(self, settings: LearnerSettings) -> None:
        self.inner.configure(settings)
        for weight in self.extra.values():
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

    def trunk_weights(self) -> Weights:
        return self.inner.trunk_weights()

    def weights(self) -> Weights:
        return {**self.inner.weights(), **self.extra}

    def tower_weights(self) -> Weights:
        return self.inner.tower_weights()

    def linear_weights(self) -> Weights:
        return self.inner.linear_weights()

    def first_mlp_weights(self) -> Weights:
        return self.inner.first_mlp_weights()

    def spu_extra_weights(self) -> Weights:
        return self.inner.spu_extra_weights()

    def projection_weights(self) -> Weights:
        return self.inner.projection_weights()

    def image_norm_weights(self) -> Weights:
        return self.inner.image_norm_weights()

    def shared_copy(self: A, own: Collection[str] = ()) -> A:
        other = copy.copy(self)
        other.inner = self.inner.shared_copy([name for name in own if name not in self.extra])
        other.extra = dict(self.extra)
        other._own_extra(own)
        return other

    def materialize(self, names: Collection[str]) -> None:
        self.inner.materialize([name for name in names if name not in self.extra])
        self._own_extra(names)

    def _own_extra(self, names: Collection[str]) -> None:
        for name in self.extra.keys() & set(names):
            mine = self.extra[name].detach().clone()
            self.extra[name] = nn.Parameter(mine, requires_grad=False)

    @property
    def preprocess(self) -> Preprocess:
        return self.inner.preprocess

    def fingerprint(self) -> str:
        return self.inner.fingerprint()


def find_wrapper(net: Backbone, kind: type[A]) -> A:
    """The addition of this kind, however deep."""
    while isinstance(net, BackboneWrapper):
        if isinstance(net, kind):
            return net
        net = net.inner
    raise LookupError(f"no {kind.__name__} in {net.name}")


class Ensemble:
    """Two experts as one, whose cosines with a caption are the mean of theirs: features side by
    side, over √2. (A class of several captions weighs each expert by how well they agree.)"""

    def __init__(self, first: Expert, second: Expert) -> None:
        self.both = (first, second)
        self.image_size = first.image_size

    @property
    def revision(self) -> int:
        return sum(expert.revision for expert in self.both)

    @property
    def logit_scale(self) -> Tensor:
        return torch.stack([expert.logit_scale for expert in self.both]).mean()

    def encode_image(self, pixels: Tensor) -> Tensor:
        return torch.cat([e.encode_image(pixels) for e in self.both], dim=1) / 2**0.5

    def encode_text(self, captions: Sequence[str]) -> Tensor:
        return torch.cat([e.encode_text(captions) for e in self.both], dim=1) / 2**0.5

    def weights(self) -> Weights:
        return {}  # none of its own
