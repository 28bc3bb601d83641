"""CLIP: pre-norm blocks in both towers, a causal text tower that is read at the end token.

MetaCLIP, LAION's models, TinyCLIP and converted checkpoints of open_clip are of this family.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dosapp.backbones.dual_encoder import DualEncoder
from dosapp.backbones.tower import Block, ImageTower, TextTower


def describe_block(layer: Any) -> Block:
    """A block of CLIP or SigLIP."""
    attention = layer.self_attn
    return Block(
        norm1=layer.layer_norm1,
        query=attention.q_proj,
        key=attention.k_proj,
        value=attention.v_proj,
        attention_output=attention.out_proj,
        head_dim=attention.head_dim,
        norm2=layer.layer_norm2,
        mlp=layer.mlp,
        first_mlp=[layer.mlp.fc1],
    )


def describe_text_tower(
    text: Any,
    projection: nn.Module,
    read_at: Callable[[Tensor], Tensor | None],
    causal: bool = False,
    pad_to_max_length: bool = False,
) -> TextTower:
    """The text tower of CLIP or SigLIP."""
    return TextTower(
        module=text,
        embeddings=text.embeddings,
        embed=text.embeddings,
        blocks=[describe_block(layer) for layer in text.encoder.layers],
        pool=text.final_layer_norm,
        projection=projection,
        read_at=read_at,
        max_length=text.config.max_position_embeddings,
        causal=causal,
        pad_to_max_length=pad_to_max_length,
    )


def describe_image_tower(vision: Any, projection: nn.Module) -> ImageTower:
    """The image tower: read at the class token."""
    return ImageTower(
        module=vision,
        embeddings=vision.embeddings,
        embed=vision.embeddings,
        tokens_norm=vision.pre_layrnorm,
        blocks=[describe_block(layer) for layer in vision.encoder.layers],
        pool=vision.post_layernorm,
        projection=projection,
        image_size=vision.config.image_size,
    )


class CLIPBackbone(DualEncoder):
    """A `CLIPModel`."""

    model_class = "CLIPModel"

    def describe_image(self, model: Any) -> ImageTower:
        return describe_image_tower(model.vision_model, model.visual_projection)

    def describe_text(self, model: Any) -> TextTower:
        text = model.text_model

        def find_end(ids: Tensor) -> Tensor:
            # The end token is the highest id where the config predates the explicit one (then 2).
            is_legacy = text.eos_token_id == 2
            return (ids if is_legacy else (ids == text.eos_token_id).int()).argmax(dim=1)

        return describe_text_tower(text, model.text_projection, find_end, causal=True)
