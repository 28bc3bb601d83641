"""LoRA: train low-rank updates of the attention's query and value projections in both towers.

W x becomes W x + (α / r) B A x. A and B are kept and train on in every session; W never changes. So
a version stores r (in + out) numbers per layer, and the rank of all that was learned is r.
"""

import math
from collections.abc import Sequence

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from dosapp.backbones.base import Backbone, Weights
from dosapp.backbones.dual_encoder import DualEncoder
from dosapp.backbones.wrappers import BackboneWrapper, find_wrapper
from dosapp.errors import InputError
from dosapp.methods.base import Batches, Method, method_dataclass
from dosapp.runtime.rng import torch_rng
from dosapp.student.student import Student
from dosapp.student.trainable_weights import Selection


class LowRankLinear(nn.Linear):
    """A linear layer with a low-rank update; its own weight and bias keep their names."""

    def __init__(self, linear: nn.Linear, r: int, scale: float, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias, self.scale = linear.weight, linear.bias, scale
        bound = 1 / math.sqrt(linear.in_features)  # as a new nn.Linear
        a = (2 * torch.rand(r, linear.in_features, generator=generator) - 1) * bound
        self.lora_A = nn.Parameter(a.to(linear.weight), requires_grad=False)
        self.lora_B = nn.Parameter(
            linear.weight.new_zeros(linear.out_features, r), requires_grad=False
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """W x + b + (α / r) B A x."""
        return super().forward(inputs) + self.scale * (inputs @ self.lora_A.T) @ self.lora_B.T


class LowRankBackbone(BackboneWrapper):
    """A backbone whose target layers have low-rank updates."""

    def __init__(
        self, inner: Backbone, targets: Sequence[str], r: int, alpha: float, seed: int
    ) -> None:
        inner = inner.shared_copy()  # layers of its own, the same weights
        encoder = _find_encoder(inner)
        model = encoder.model
        generator = torch_rng("lora", seed)
        for path, layer in list(model.named_modules()):
            parent, _, leaf = path.rpartition(".")
            if leaf in targets and isinstance(layer, nn.Linear):
                low_rank = LowRankLinear(layer, r, alpha / r, generator)
                setattr(model.get_submodule(parent), leaf, low_rank)
        encoder.describe_towers()
        super().__init__(inner, {})
        if not self.low_rank_weights():
            raise InputError(f"no layer is named {' or '.join(targets)}; try q_proj, v_proj or fc1")

    def low_rank_weights(self) -> Weights:
        """A and B of every target layer."""
        return {n: w for n, w in self.weights().items() if _is_low_rank(n)}

    def own_weights(self) -> Weights:
        return {n: w for n, w in super().own_weights().items() if not _is_low_rank(n)}

    def merge(self) -> DualEncoder:
        """A plain model with W + (α / r) B A in place of W, to be exported."""
        merged = _find_encoder(self.inner).shared_copy()
        for path, layer in list(merged.model.named_modules()):
            if isinstance(layer, LowRankLinear):
                parent, _, leaf = path.rpartition(".")
                update = layer.scale * layer.lora_B @ layer.lora_A
                plain = nn.utils.skip_init(nn.Linear, layer.in_features, layer.out_features)
                plain.weight, plain.bias = nn.Parameter(layer.weight + update), layer.bias
                setattr(merged.model.get_submodule(parent), leaf, plain.requires_grad_(False))
        merged.describe_towers()
        return merged


def _is_low_rank(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))


def _find_encoder(backbone: Backbone) -> DualEncoder:
    """The model inside wrappers."""
    while isinstance(backbone, BackboneWrapper):
        backbone = backbone.inner
    if not isinstance(backbone, DualEncoder):
        raise InputError(f"lora knows the layers of dual encoders only, not of '{backbone.name}'")
    return backbone


@method_dataclass
class LoRA(Method):
    """The CLIP loss on low-rank updates; everything else is frozen."""

    summary = "train low-rank updates of the attention, kept over sessions"
    reference = "Hu et al., 2022"

    r: PositiveInt = 8  # rank
    lora_alpha: PositiveFloat = 8.0  # α; updates are scaled by α / r
    target_modules: tuple[str, ...] = ("q_proj", "v_proj")  # names of layers, in both towers

    def wrap_backbone(self, backbone: Backbone, seed: int) -> Backbone:
        return LowRankBackbone(backbone, self.target_modules, self.r, self.lora_alpha, seed)

    def select_parameters(self, student: Student, batches: Batches) -> Selection:
        return Selection(tuple(find_wrapper(student.backbone, LowRankBackbone).low_rank_weights()))
