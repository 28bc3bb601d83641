"""SigLIP and SigLIP 2: no causal attention; the image tower ends in attention pooling.

Captions are padded to the full length, padding takes part and the last token is read, as in
training. Losses and predictions are a softmax over classes, as for CLIP: the bias of SigLIP's
sigmoid cancels there and stays as it is. The pooling head is not a block: its MLP has no
candidates. Checkpoints of SigLIP 2 with a fixed resolution are `SiglipModel`s; those of any
resolution (`Siglip2Model`, NaFlex) are used at their square base resolution.
"""

import math
from typing import Any

from torch import Tensor

from dosapp.backbones.clip import describe_block, describe_text_tower
from dosapp.backbones.dual_encoder import DualEncoder
from dosapp.backbones.tower import ImageTower, TextTower, read_all, read_last
from dosapp.errors import InputError


class SiglipBackbone(DualEncoder):
    """A `SiglipModel`."""

    model_class = "SiglipModel"
    image_processor = "SiglipImageProcessor"

    def describe_image(self, model: Any) -> ImageTower:
        vision = model.vision_model
        if not vision.use_head:
            raise InputError(
                f"the image tower of '{self.name}' has no pooling head (vision_use_head), so it "
                "has no image feature; use a checkpoint with one"
            )

        def pool(tokens: Tensor) -> Tensor:  # [B, L, W] → [B, W]
            pooled: Tensor = vision.head(vision.post_layernorm(tokens))
            return pooled

        return ImageTower(
            module=vision,
            embeddings=vision.embeddings,
            embed=self.embed_pixels,
            blocks=[describe_block(layer) for layer in vision.encoder.layers],
            pool=pool,
            read_at=read_all,
            first_patch=0,
            image_size=self.find_image_size(vision.config),
        )

    def find_image_size(self, config: Any) -> int:
        """The side of an image."""
        size: int = config.image_size
        return size

    def embed_pixels(self, pixels: Tensor) -> Tensor:
        """Patches with their positions `[B, L, W]`."""
        rows: Tensor = self.model.vision_model.embeddings(pixels)
        return rows

    def describe_text(self, model: Any) -> TextTower:
        text = model.text_model
        return describe_text_tower(text, text.head, read_last, pad_to_max_length=True)


class Siglip2Backbone(SiglipBackbone):
    """A `Siglip2Model` at its base resolution."""

    model_class = "Siglip2Model"
    image_processor = "Siglip2ImageProcessor"

    def find_image_size(self, config: Any) -> int:
        return math.isqrt(config.num_patches) * int(config.patch_size)

    def embed_pixels(self, pixels: Tensor) -> Tensor:
        embeddings = self.model.vision_model.embeddings
        side = embeddings.patch_size
        patches = pixels.unfold(2, side, side).unfold(3, side, side)  # [B, 3, h, w, side, side]
        flat = patches.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)  # [B, h·w, side·side·3]
        rows: Tensor = embeddings.patch_embedding(flat) + embeddings.position_embedding.weight
        return rows
