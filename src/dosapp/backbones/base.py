"""What everything above asks of a two-tower model. Nobody else knows which library it came from."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from PIL import Image
from torch import Tensor, nn


class Backbone(Protocol):
    name: str
    pixels: int  # pictures are square: uint8 or float [B, 3, pixels, pixels]
    revision: int  # raised by whoever changes a weight; caches are keyed on it

    @property
    def scale(self) -> Tensor:
        """What cosines are multiplied with before a softmax, exp(logit_scale)."""

    def encode_image(self, pixels: Tensor, prompts: Tensor | None = None) -> Tensor:
        """Unit features `[B, D]` of pictures in [0, 1]; `prompts [B, P, W]` join the patches."""

    def encode_text(self, captions: Sequence[str]) -> Tensor:
        """Unit features `[C, D]`."""

    def weights(self) -> Mapping[str, nn.Parameter]:
        """All of them, by name."""

    def first_mlp(self) -> Mapping[str, nn.Parameter]:
        """The paper's candidates: the first MLP layer's weights of every block of both towers."""

    def beside_first_mlp(self) -> Mapping[str, nn.Parameter]:
        """What SPU's code updates whole: the biases of those layers and the image projection."""

    def image_norms(self) -> Mapping[str, nn.Parameter]:
        """The affine weights of the image tower's LayerNorms."""

    def twin(self, own: Collection[str] = ()) -> "Backbone":
        """Another backbone that shares every tensor with this one except those named in `own`."""

    def own(self, names: Collection[str]) -> None:
        """Stop sharing these: copy them, so that they no longer move with the other's."""

    def picture(self, image: Image.Image) -> Tensor:
        """Resize and crop as the model was trained; `uint8 [3, pixels, pixels]`."""

    def fingerprint(self) -> str:
        """A checksum of the weights and of everything that decides what they compute."""
