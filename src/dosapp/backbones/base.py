"""What everything above asks of a two-tower model. Nobody else knows which library it came from."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from torch import Tensor, nn

from dosapp.data.preprocess import Preprocess
from dosapp.settings import LearnerSettings

if TYPE_CHECKING:
    from dosapp.backbones.tower import Tokens

Inputs = TypeVar("Inputs")
Weights = Mapping[str, nn.Parameter]
BlockHook = Callable[[Tensor, Tensor], Tensor]  # what entered a part, what left it → what goes on


@dataclass(frozen=True)
class TowerHooks:
    """What a method adds on the way through the image tower; tokens are `[B, L, W]`."""

    prompts: Tensor | None = None  # [B, P, W]: tokens that join the patches
    prefixes: Mapping[int, Tensor] = field(
        default_factory=dict
    )  # block → keys, values [2, B, P, W]
    block_hooks: Mapping[int, BlockHook] = field(
        default_factory=dict
    )  # a part's last block → what follows


@dataclass(frozen=True)
class TrunkOutput(Generic[Inputs]):
    """Pictures or captions after the trunk. Whatever takes those takes this too, for any expert
    whose trunk has the same tensors. Whoever adds prompts starts again from what was inputs: they
    enter before the trunk ends."""

    inputs: Inputs
    tokens: "Tokens"

    def __len__(self) -> int:
        return len(self.tokens.rows)

    def __getitem__(self, part: slice) -> "TrunkOutput[Inputs]":
        tokens = replace(self.tokens, rows=self.tokens.rows[part], at=self.tokens.at[part])
        return TrunkOutput(self.inputs[part], tokens)  # type: ignore[index]


Pixels = Tensor | TrunkOutput[Tensor]  # [B, 3, H, W] in [0, 1]
Captions = Sequence[str] | TrunkOutput[Sequence[str]]


class Expert(Protocol):
    """Whoever can be asked about a picture."""

    image_size: int  # pictures are square: uint8 or float [B, 3, pixels, pixels]

    @property
    def revision(self) -> int:
        """Raised by whoever changes a weight; caches are keyed on it."""

    @property
    def logit_scale(self) -> Tensor:
        """What cosines are multiplied with before a softmax, exp(logit_scale)."""

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Unit features `[B, D]` of pictures in [0, 1]."""

    def encode_text(self, captions: Sequence[str]) -> Tensor:
        """Unit features `[C, D]`."""

    def weights(self) -> Weights:
        """All of them, by name."""


class Backbone(Protocol):
    """An expert whose parts are known, so that it can be taught."""

    name: str
    image_size: int
    revision: int
    hidden_size: int  # W, of a token of the image tower
    num_blocks: int  # of the image tower
    embed_dim: int  # D

    @property
    def logit_scale(self) -> Tensor: ...

    def configure(self, settings: LearnerSettings) -> None:
        """From now on on that device, in that precision, so many images at a time, …"""

    def encode_image(self, pixels: Pixels, hooks: TowerHooks | None = None) -> Tensor:
        """`project_image` of `pool_image`."""

    def encode_text(self, captions: Captions) -> Tensor: ...

    def pool_image(self, pixels: Pixels, hooks: TowerHooks | None = None) -> Tensor:
        """`[B, W]`: what the image projection reads."""

    def project_image(self, pooled: Tensor) -> Tensor:
        """Unit features `[B, D]`."""

    def encode_image_trunk(self, pixels: Tensor) -> Pixels:
        """Through the trunk, for whoever has the same; or as they were, if that does not pay."""

    def encode_text_trunk(self, captions: Sequence[str]) -> Captions:
        """Likewise."""

    def trunk_weights(self) -> Weights:
        """What is used before the first candidate, in either tower."""

    def weights(self) -> Weights:
        """All of them, by name: the towers', and what methods have put beside them."""

    def tower_weights(self) -> Weights:
        """What the model came with."""

    def linear_weights(self) -> Weights:
        """The weights of the linear layers in every block of both towers."""

    def first_mlp_weights(self) -> Weights:
        """The paper's candidates: the first MLP layer's weights of every block of both towers."""

    def spu_extra_weights(self) -> Weights:
        """What SPU's code updates whole: the biases of those layers and the image projection."""

    def projection_weights(self) -> Weights:
        """From each tower into the common space."""

    def image_norm_weights(self) -> Weights:
        """The affine weights of the image tower's LayerNorms."""

    def shared_copy(self, own: Collection[str] = ()) -> "Backbone":
        """Another backbone that shares every tensor with this one except those named in `own`."""

    def materialize(self, names: Collection[str]) -> None:
        """Stop sharing these: copy them, so that they no longer move with the other's."""

    @property
    def preprocess(self) -> Preprocess:
        """Resize and crop of an image for this backbone."""

    def fingerprint(self) -> str:
        """A checksum of the weights and of everything that decides what they compute."""
