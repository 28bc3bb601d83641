"""EcoTTA: train small meta networks beside a frozen image tower.

A port to transformers. The blocks of the image tower are split into partitions. The meta network of
a partition is an affine map of its output plus a bottleneck of its input; it starts as the identity
of the output. Meta networks are warmed up on each session's images. On the stream they minimise the
entropy of reliable images, with an L1 penalty to the frozen partitions' outputs.
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
from dosapp.student.student import Student
from dosapp.student.trainable_weights import Selection


class MetaNetworks(BackboneWrapper):
    """The meta networks of all partitions.

    `deviations` holds, for each partition, the mean L1 distance between its output with and without
    the meta network in the last forward pass.
    """

    def __init__(self, inner: Backbone, partitions: int, bottleneck: int, seed: int) -> None:
        partitions = min(partitions, inner.num_blocks)
        size = inner.num_blocks // partitions  # the last one takes the rest: 12 → 2, 2, 2, 2, 4
        self.last_blocks = [size * (n + 1) - 1 for n in range(partitions - 1)]
        self.last_blocks.append(inner.num_blocks - 1)
        generator, width = torch_rng("ecotta", seed), inner.hidden_size
        added = {}
        for n in range(partitions):
            down = torch.randn(width, bottleneck, generator=generator) / width**0.5
            added[f"ecotta.{n}.scale"] = torch.ones(width)
            added[f"ecotta.{n}.shift"] = torch.zeros(width)
            added[f"ecotta.{n}.down"] = down
            added[f"ecotta.{n}.up"] = torch.zeros(bottleneck, width)
        super().__init__(inner, added)
        self.deviations: list[Tensor] = []

    def pool_image(self, pixels: Pixels, hooks: TowerHooks | None = None) -> Tensor:
        self.deviations = []
        block_hooks = {block: self.block_hook(n) for n, block in enumerate(self.last_blocks)}
        hooks = replace(hooks or TowerHooks(), block_hooks=block_hooks)
        return self.inner.pool_image(pixels, hooks)

    def block_hook(self, partition: int) -> BlockHook:
        """The meta network of a partition: its input and output `[B, L, W]` → a new output."""
        scale, shift, down, up = (
            self.added[f"ecotta.{partition}.{name}"] for name in ("scale", "shift", "down", "up")
        )

        def meta_network(inputs: Tensor, outputs: Tensor) -> Tensor:
            return outputs * scale + shift + (inputs @ down).relu() @ up

        def hook(inputs: Tensor, outputs: Tensor) -> Tensor:
            if torch.is_grad_enabled():  # the penalty of a partition trains its own network only
                frozen = outputs.detach()
                deviation = meta_network(inputs.detach(), frozen) - frozen
                self.deviations.append(deviation.abs().mean())
            return meta_network(inputs, outputs)

        return hook


@method_dataclass
class EcoTTA(Method):
    """Meta networks with self-distilled regularisation: entropy + λ Σ |meta output - output|."""

    summary = "train meta networks beside a frozen network, near the frozen outputs"
    reference = "Song et al., 2023"
    phase = "unlabelled"
    abilities = frozenset({"corrupted data", "reduces forgetting"})
    old_names = {
        "num_partitions": "parts",
        "lambda_reg": "stay",
        "e_margin": "margin",
        "warmup_epochs": "warmup",
    }

    num_partitions: PositiveInt = 5  # K
    bottleneck: PositiveInt = 16  # width
    lambda_reg: NonNegativeFloat = 0.25  # λ
    e_margin: PositiveFloat = 0.4  # train on images with an entropy below this times ln C
    warmup_epochs: NonNegativeInt = 1  # on each session's images

    def wrap_backbone(self, backbone: Backbone, seed: int) -> Backbone:
        return MetaNetworks(backbone, self.num_partitions, self.bottleneck, seed)

    def meta_selection(self, student: Student) -> Selection:
        """All weights of the meta networks."""
        return Selection(tuple(find_wrapper(student.backbone, MetaNetworks).added))

    def extra_stages(self, student: Student, steps_per_epoch: int) -> Sequence[TrainingStage]:
        """The warm-up."""

        def loss(student: Student, read_batch: Callable[[], Batch], step: int) -> Tensor:
            batch = read_batch()
            return cross_entropy(student.scaled_image_logits(batch.pixels), batch.labels)

        steps = self.warmup_epochs * steps_per_epoch
        return [TrainingStage(steps, self.meta_selection(student), loss)]

    def begin_stream(self, student: Student) -> None:
        student.set_trainable(self.meta_selection(student))

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        logits = student.scaled_image_logits(pixels)
        entropies = entropy(logits)
        reliable = entropies.detach() < self.e_margin * math.log(logits.shape[1])
        deviations = find_wrapper(student.backbone, MetaNetworks).deviations
        penalty = self.lambda_reg * torch.stack(deviations).sum()
        loss = penalty + (entropies * reliable).sum() / reliable.sum().clamp(min=1)
        return AdaptResult(logits.argmax(dim=1), loss)
