"""The interface of a dual-encoder model. Nothing else depends on the library it comes from."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from torch import Tensor, nn

from dosapp.data.preprocess import Preprocess
from dosapp.settings import LearnerSettings

if TYPE_CHECKING:
    from dosapp.backbones.tower import Tokens

Inputs = TypeVar("Inputs")
Weights = Mapping[str, nn.Parameter]
BlockHook = Callable[[Tensor, Tensor], Tensor]  # (input, output) of some blocks → new output


@dataclass(frozen=True)
class TowerHooks:
    """What a method adds inside the image tower; tokens are `[B, L, W]`."""

    prompts: Tensor | None = None  # [B, P, W]: tokens beside the patches
    # block → additional keys and values [2, B, P, W]
    prefixes: Mapping[int, Tensor] = field(default_factory=dict)
    # last block of a part → applied to the part's input and output
    block_hooks: Mapping[int, BlockHook] = field(default_factory=dict)


@dataclass(frozen=True)
class TrunkOutput(Generic[Inputs]):
    """Images or captions after the trunk, for any model that shares the trunk's weights.

    Encoders take it instead of the inputs. A model with prompts starts again from the inputs,
    because prompts enter before the trunk ends.
    """

    inputs: Inputs
    tokens: "Tokens"

    def __len__(self) -> int:
        return len(self.tokens.rows)

    def __getitem__(self, rows: slice) -> "TrunkOutput[Inputs]":
        return TrunkOutput(self.inputs[rows], self.tokens[rows])  # type: ignore[index]


Pixels = Tensor | TrunkOutput[Tensor]  # [B, 3, H, W] in [0, 1]
Captions = Sequence[str] | TrunkOutput[Sequence[str]]


class Expert(Protocol):
    """A model that can predict."""

    image_size: int  # images are [B, 3, image_size, image_size]

    @property
    def revision(self) -> int:
        """Increased whenever a weight changes; caches are keyed by it."""

    @property
    def logit_scale(self) -> Tensor:
        """The factor on cosines before a softmax: exp of CLIP's parameter."""

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Unit features `[B, D]` of images in [0, 1]."""

    def encode_text(self, captions: Sequence[str]) -> Tensor:
        """Unit features `[C, D]` of captions."""

    def weights(self) -> Weights:
        """All weights by name."""


class Backbone(Protocol):
    """An expert whose parts are known, so that it can be trained."""

    name: str
    image_size: int
    revision: int
    hidden_size: int  # W, of the image tower
    num_blocks: int  # of the image tower
    embed_dim: int  # D

    @property
    def logit_scale(self) -> Tensor:
        """The factor on cosines before a softmax: exp of CLIP's parameter."""

    @property
    def preprocess(self) -> Preprocess:
        """Resize and crop of an image for this backbone."""

    def configure(self, settings: LearnerSettings) -> None:
        """Set device, precision, compilation, microbatch and gradient checkpointing."""

    # Features

    def encode_image(self, pixels: Pixels, hooks: TowerHooks | None = None) -> Tensor:
        """`project_image(pool_image(pixels))`."""

    def pool_image(self, pixels: Pixels, hooks: TowerHooks | None = None) -> Tensor:
        """The input of the image projection `[B, W]`."""

    def project_image(self, pooled: Tensor) -> Tensor:
        """Unit features `[B, D]`."""

    def encode_text(self, captions: Captions) -> Tensor:
        """Unit features `[C, D]` of captions."""

    def encode_image_trunk(self, pixels: Tensor) -> Pixels:
        """Run images through the trunk; as they were if sharing it does not pay."""

    def encode_text_trunk(self, captions: Sequence[str]) -> Captions:
        """Run captions through the trunk; as they were if sharing it does not pay."""

    # Weights by name

    def weights(self) -> Weights:
        """All weights: the towers' and those that methods have added."""

    def own_weights(self) -> Weights:
        """The towers' weights as they are now, without those that methods have added."""

    def trunk_weights(self) -> Weights:
        """The weights used before the first MLP of either tower."""

    def first_mlp_weights(self) -> Weights:
        """The paper's candidates: weights of the first MLP layer of every block of both towers."""

    def spu_extra_weights(self) -> Weights:
        """What SPU's code trains besides: the biases of those layers and the image projection."""

    def linear_weights(self) -> Weights:
        """The weights of the linear layers in every block of both towers."""

    def projection_weights(self) -> Weights:
        """The projections of both towers into the common space."""

    def image_norm_weights(self) -> Weights:
        """The affine weights of the image tower's LayerNorms."""

    # Copies

    def shared_copy(self, unshared: Collection[str] = ()) -> "Backbone":
        """A copy that shares all tensors except the weights named in `unshared`."""

    def unshare(self, names: Collection[str]) -> None:
        """Stop sharing these weights with other copies: give them tensors of their own."""

    def fingerprint(self) -> str:
        """A checksum of the weights and of everything that decides what they compute."""
