"""A backbone whose towers' work is shared out among processes."""

from collections.abc import Sequence

from torch import Tensor

from dosapp.backbones.base import Backbone, Captions, Insert, Pixels
from dosapp.backbones.wrappers import Added
from dosapp.runtime import distributed


class Shared(Added):
    """Gives the same features in every process, each of which has computed a part of them."""

    def __init__(self, inner: Backbone) -> None:
        super().__init__(inner, {})

    def pool_image(self, pixels: Pixels, insert: Insert | None = None) -> Tensor:
        if insert is not None:  # made for the whole batch
            return self.inner.pool_image(pixels, insert)
        return distributed.encode_sharded(self.inner.pool_image, pixels)

    def encode_text(self, captions: Captions) -> Tensor:
        return distributed.encode_sharded(self.inner.encode_text, captions)

    def begin_image(self, pixels: Tensor) -> Tensor:
        return pixels  # through the trunk when they have been shared out

    def begin_text(self, captions: Sequence[str]) -> Sequence[str]:
        return captions
