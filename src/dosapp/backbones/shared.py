"""A backbone whose towers' work is shared out among processes."""

from collections.abc import Sequence

from torch import Tensor

from dosapp import ranks
from dosapp.backbones.added import Added
from dosapp.backbones.base import Backbone, Insert


class Shared(Added):
    """Gives the same features in every process, each of which has computed a part of them."""

    def __init__(self, inner: Backbone) -> None:
        super().__init__(inner, {})

    def pool_image(self, pixels: Tensor, insert: Insert | None = None) -> Tensor:
        total = len(pixels)
        if insert is not None or total < ranks.count():  # an insert is made for the whole batch
            return self.inner.pool_image(pixels, insert)
        mine = ranks.rows_of(total, ranks.rank())
        return ranks.gathered(self.inner.pool_image(pixels[mine.start : mine.stop]), total)

    def encode_text(self, captions: Sequence[str]) -> Tensor:
        total = len(captions)
        if total < ranks.count():
            return self.inner.encode_text(captions)
        mine = ranks.rows_of(total, ranks.rank())
        return ranks.gathered(self.inner.encode_text(captions[mine.start : mine.stop]), total)
