"""`VisionTextDualEncoderModel`: ViT, DeiT, DINOv2 or CLIP for images, BERT or RoBERTa for text.

The text towers are not causal: captions are padded to the longest, and padding is masked.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from dosapp.backbones import clip
from dosapp.backbones.dual_encoder import DualEncoder
from dosapp.backbones.tower import Block, ImageTower, TextTower
from dosapp.errors import InputError


def describe_vit(vision: Any, projection: nn.Module) -> ImageTower:
    """ViT and DeiT (which has a second token before the patches)."""

    def describe_block(layer: Any) -> Block:
        attention = layer.attention
        return Block(
            norm1=layer.layernorm_before,
            query=attention.q_proj,
            key=attention.k_proj,
            value=attention.v_proj,
            attention_output=attention.o_proj,
            head_dim=attention.head_dim,
            norm2=layer.layernorm_after,
            mlp=layer.mlp,
            first_mlp=[layer.mlp.fc1],
        )

    return ImageTower(
        module=vision,
        embeddings=vision.embeddings,
        embed=vision.embeddings,
        blocks=[describe_block(layer) for layer in vision.layers],
        pool=lambda token: vision.pooler(vision.layernorm(token)[:, None]),
        projection=projection,
        first_patch=2 if hasattr(vision.embeddings, "distillation_token") else 1,
        image_size=vision.config.image_size,
    )


def describe_dinov2(vision: Any, projection: nn.Module) -> ImageTower:
    """DINOv2: LayerScale belongs to both halves of a block; a SwiGLU has two first layers."""

    def describe_block(layer: Any) -> Block:
        attention, mlp = layer.attention, layer.mlp
        first_mlp = [mlp.fc1] if hasattr(mlp, "fc1") else [mlp.gate_proj, mlp.up_proj]
        return Block(
            norm1=layer.norm1,
            query=attention.q_proj,
            key=attention.k_proj,
            value=attention.v_proj,
            attention_output=nn.Sequential(attention.o_proj, layer.layer_scale1),
            head_dim=attention.head_dim,
            norm2=layer.norm2,
            mlp=nn.Sequential(mlp, layer.layer_scale2),
            first_mlp=first_mlp,
        )

    return ImageTower(
        module=vision,
        embeddings=vision.embeddings,
        embed=vision.embeddings,
        blocks=[describe_block(layer) for layer in vision.encoder.layer],
        pool=vision.layernorm,
        projection=projection,
        image_size=vision.config.image_size,
        resizable=True,  # it interpolates its positions
    )


def describe_bert(text: Any, projection: nn.Module) -> TextTower:
    """BERT, RoBERTa and those with their parts: norms follow the sums, [CLS] is read."""

    def describe_block(layer: Any) -> Block:
        attention, output = layer.attention, layer.output
        return Block(
            norm1=attention.output.LayerNorm,
            query=attention.self.query,
            key=attention.self.key,
            value=attention.self.value,
            attention_output=attention.output.dense,
            head_dim=attention.self.attention_head_size,
            norm2=output.LayerNorm,
            mlp=nn.Sequential(layer.intermediate, output.dense),
            first_mlp=[layer.intermediate.dense],
            post_norm=True,
        )

    positions, padding = text.config.max_position_embeddings, text.config.pad_token_id
    counts_from_padding = hasattr(text.embeddings, "padding_idx")  # RoBERTa's positions
    return TextTower(
        module=text,
        embeddings=text.embeddings,
        embed=text.embeddings,
        blocks=[describe_block(layer) for layer in text.encoder.layer],
        pool=lambda token: text.pooler(token[:, None]),
        projection=projection,
        max_length=positions - padding - 1 if counts_from_padding else positions,
    )


IMAGE_TOWERS: dict[str, Callable[[Any, nn.Module], ImageTower]] = {
    "vit": describe_vit,
    "deit": describe_vit,
    "dinov2": describe_dinov2,
    "clip_vision_model": clip.describe_image_tower,
}
TEXT_TOWERS: dict[str, Callable[[Any, nn.Module], TextTower]] = {
    "bert": describe_bert,
    "roberta": describe_bert,
    "xlm-roberta": describe_bert,
    "camembert": describe_bert,
}


class VisionTextBackbone(DualEncoder):
    """A `VisionTextDualEncoderModel`."""

    model_class = "VisionTextDualEncoderModel"

    def describe_image(self, model: Any) -> ImageTower:
        kind = model.config.vision_config.model_type
        if kind not in IMAGE_TOWERS:
            raise _unknown_tower("an image", kind, IMAGE_TOWERS)
        return IMAGE_TOWERS[kind](model.vision_model, model.visual_projection)

    def describe_text(self, model: Any) -> TextTower:
        kind = model.config.text_config.model_type
        if kind not in TEXT_TOWERS:
            raise _unknown_tower("a text", kind, TEXT_TOWERS)
        return TEXT_TOWERS[kind](model.text_model, model.text_projection)


def _unknown_tower(what: str, kind: str, known: dict[str, Any]) -> InputError:
    return InputError(
        f"{what} tower of type '{kind}' is not known, only {', '.join(known)}; describe it in "
        "backbones/vision_text.py (docs/backbones.md)"
    )
