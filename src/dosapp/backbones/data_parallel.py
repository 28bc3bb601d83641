"""A backbone whose encoders share their work among processes."""

from collections.abc import Sequence

from torch import Tensor

from dosapp.backbones.base import Backbone, Captions, Pixels, TowerHooks
from dosapp.backbones.wrappers import BackboneWrapper
from dosapp.runtime import distributed


class DataParallelBackbone(BackboneWrapper):
    """Every process encodes a part of the rows and gets the features of all."""

    def __init__(self, inner: Backbone) -> None:
        super().__init__(inner, {})

    def pool_image(self, pixels: Pixels, hooks: TowerHooks | None = None) -> Tensor:
        if hooks is not None:  # hooks are made for the whole batch
            return self.inner.pool_image(pixels, hooks)
        return distributed.encode_in_parallel(self.inner.pool_image, pixels)

    def encode_text(self, captions: Captions) -> Tensor:
        return distributed.encode_in_parallel(self.inner.encode_text, captions)

    def encode_image_trunk(self, pixels: Tensor) -> Tensor:
        return pixels  # each process runs the trunk for its own rows

    def encode_text_trunk(self, captions: Sequence[str]) -> Sequence[str]:
        return captions
