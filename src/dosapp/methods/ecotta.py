"""EcoTTA: leave the network alone and learn small networks beside its parts.

A port to transformers. Each part of the image tower gets a meta network: an affine map of what
leaves the part plus a bottleneck of what entered it, which begin as doing nothing. They warm up on
each session's lessons, then lower the entropy of sure images near what the frozen parts say.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import cross_entropy

from dosapp.backbones.base import Backbone, BlockHook, Pixels, TowerHooks
from dosapp.backbones.wrappers import BackboneWrapper, find_wrapper
from dosapp.functional.losses import entropy
from dosapp.methods.base import AdaptResult, Batch, Method, TrainingStage, method_dataclass
from dosapp.runtime.rng import torch_rng
from dosapp.student.selection import Selection
from dosapp.student.student import Student


class Meta(BackboneWrapper):
    """The meta networks of all parts; `strayed` collects how far each went in the last pass."""

    def __init__(self, inner: Backbone, parts: int, narrow: int, seed: int) -> None:
        parts = min(parts, inner.num_blocks)
        size = inner.num_blocks // parts  # the last part takes what is left: 12 → 2, 2, 2, 2, 4
        self.ends = [size * (n + 1) - 1 for n in range(parts - 1)] + [inner.num_blocks - 1]
        generator, wide = torch_rng("ecotta", seed), inner.hidden_size
        extra = {}
        for n in range(parts):
            extra[f"ecotta.{n}.scale"] = torch.ones(wide)
            extra[f"ecotta.{n}.shift"] = torch.zeros(wide)
            extra[f"ecotta.{n}.down"] = torch.randn(wide, narrow, generator=generator) / wide**0.5
            extra[f"ecotta.{n}.up"] = torch.zeros(narrow, wide)
        super().__init__(inner, extra)
        self.strayed: list[Tensor] = []

    def pool_image(self, pixels: Pixels, hooks: TowerHooks | None = None) -> Tensor:
        self.strayed = []
        block_hooks = {end: self._joint(n) for n, end in enumerate(self.ends)}
        return self.inner.pool_image(
            pixels, replace(hooks or TowerHooks(), block_hooks=block_hooks)
        )

    def _joint(self, part: int) -> BlockHook:
        scale, shift, down, up = (
            self.extra[f"ecotta.{part}.{name}"] for name in ("scale", "shift", "down", "up")
        )

        def mixed(entered: Tensor, left: Tensor) -> Tensor:
            return left * scale + shift + (entered @ down).relu() @ up

        def join(entered: Tensor, left: Tensor) -> Tensor:
            if torch.is_grad_enabled():  # each part answers for itself: its input is given
                alone = mixed(entered.detach(), left.detach())
                self.strayed.append((alone - left.detach()).abs().mean())
            return mixed(entered, left)

        return join


@method_dataclass
class EcoTTA(Method):
    summary = "train meta networks beside a frozen network, near what its parts would say"
    reference = "Song et al., 2023"
    phase = "unlabelled"
    abilities = frozenset({"corrupted data", "reduces forgetting"})

    parts: PositiveInt = 5
    bottleneck: PositiveInt = 16
    stay: NonNegativeFloat = 0.25  # λ, of the distance from the frozen parts
    margin: PositiveFloat = 0.4  # sure: entropy below this times ln C
    warmup: NonNegativeInt = 1  # passes over each session's lessons

    def wrap_backbone(self, net: Backbone, seed: int) -> Backbone:
        return Meta(net, self.parts, self.bottleneck, seed)

    def selection(self, student: Student) -> Selection:
        return Selection(tuple(find_wrapper(student.backbone, Meta).extra))

    def extra_stages(self, student: Student, per_epoch: int) -> Sequence[TrainingStage]:
        def loss(student: Student, batch: Callable[[], Batch], step: int) -> Tensor:
            lesson = batch()
            return cross_entropy(student.image_logits(lesson.pixels), lesson.labels)

        return [TrainingStage(self.warmup * per_epoch, self.selection(student), loss)]

    def begin_stream(self, student: Student) -> None:
        student.set_trainable(self.selection(student))

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        logits = student.image_logits(pixels)
        unsure = entropy(logits)
        sure = unsure.detach() < self.margin * math.log(logits.shape[1])
        strayed = torch.stack(find_wrapper(student.backbone, Meta).strayed).sum()
        loss = self.stay * strayed + (unsure * sure).sum() / sure.sum().clamp(min=1)
        return AdaptResult(logits.argmax(dim=1), loss)
