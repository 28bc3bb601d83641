"""Prompts with keys around a backbone: a pool beside the patches (L2P), or prefixes in the first
blocks' attention (DualPrompt). A picture's own feature, without any, decides which it gets.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from dosapp.backbones.base import Backbone, Pixels, TowerHooks
from dosapp.backbones.wrappers import BackboneWrapper
from dosapp.runtime.rng import torch_rng


def uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=generator) * 2 - 1


class Keyed(BackboneWrapper):
    """Prompts with keys. `near [B]`: how near the keys in use were to the last batch's queries."""

    keys: str  # the name of their tensor
    near: Tensor

    def query(self, pixels: Pixels) -> Tensor:
        """Features `[B, D]` without any prompt."""
        with torch.no_grad():
            return self.inner.encode_image(pixels)

    def likeness(self, query: Tensor) -> Tensor:
        """Cosines `[B, keys]`."""
        return query @ normalize(self.extra[self.keys], dim=-1).T


class Pool(Keyed):
    """L2P: the prompts of a picture's `take` nearest keys join its patches."""

    keys = "l2p.keys"

    def __init__(
        self, inner: Backbone, size: int, length: int, take: int, together: bool, seed: int
    ) -> None:
        generator = torch_rng("l2p", seed)
        extra = {
            "l2p.prompts": uniform(generator, size, length, inner.hidden_size),
            self.keys: uniform(generator, size, inner.embed_dim),
        }
        super().__init__(inner, extra)
        self.take, self.together = take, together

    def nearest(self, likeness: Tensor) -> Tensor:
        """Keys for each picture `[B, take]`; together: the batch's most frequent ones for all."""
        found = likeness.topk(self.take, dim=1).indices
        if self.together:
            votes = found.flatten().bincount(minlength=likeness.shape[1])
            found = votes.topk(self.take).indices.expand(len(likeness), -1)
        return found

    def pool_image(self, pixels: Pixels, hooks: TowerHooks | None = None) -> Tensor:
        likeness = self.likeness(self.query(pixels))
        found = self.nearest(likeness)
        self.near = likeness.gather(1, found).sum(dim=1)
        prompts = self.extra["l2p.prompts"][found].flatten(1, 2)  # [B, take · length, W]
        return self.inner.pool_image(pixels, replace(hooks or TowerHooks(), prompts=prompts))


@dataclass
class Route:
    """Which expert prompts are in use; a network and its twins read the same."""

    known: int = 0  # sessions that have prompts
    teaching: bool = False  # then everything goes to the newest


class Prefixes(Keyed):
    """DualPrompt: more keys and values in the first blocks, some for all, some for one session."""

    keys = "dualprompt.keys"

    def __init__(
        self, inner: Backbone, size: int, length: int, general: int, expert: int, seed: int
    ) -> None:
        generator = torch_rng("dualprompt", seed)
        self.general = range(min(general, inner.num_blocks))
        self.expert = range(len(self.general), min(general + expert, inner.num_blocks))
        shape = (2, length, inner.hidden_size)
        extra = {
            "dualprompt.general": uniform(generator, len(self.general), *shape),
            "dualprompt.expert": uniform(generator, size, len(self.expert), *shape),
            self.keys: uniform(generator, size, inner.embed_dim),
        }
        super().__init__(inner, extra)
        self.route = Route()

    def pool_image(self, pixels: Pixels, hooks: TowerHooks | None = None) -> Tensor:
        likeness = self.likeness(self.query(pixels))[:, : max(1, self.route.known)]
        row = likeness.argmax(dim=1)
        if self.route.teaching:
            row = torch.full_like(row, self.route.known - 1)
        self.near = likeness.gather(1, row[:, None]).squeeze(1)
        shared = self.extra["dualprompt.general"][:, :, None].expand(-1, -1, len(pixels), -1, -1)
        mine = self.extra["dualprompt.expert"][row].permute(1, 2, 0, 3, 4)  # [blocks, 2, B, P, W]
        prefixes = dict(zip((*self.general, *self.expert), (*shared, *mine), strict=True))
        return self.inner.pool_image(pixels, replace(hooks or TowerHooks(), prefixes=prefixes))
