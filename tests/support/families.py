"""A tiny model with random weights of every family, with a tokenizer and a preprocessing."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dosapp.backbones.checkpoint import import_transformers
from dosapp.backbones.clip import CLIPBackbone
from dosapp.backbones.dual_encoder import DualEncoder
from dosapp.backbones.siglip import Siglip2Backbone, SiglipBackbone
from dosapp.backbones.vision_text import VisionTextBackbone

SIZE = {"hidden_size": 32, "intermediate_size": 64}
SIZE |= {"num_hidden_layers": 2, "num_attention_heads": 2}
VISION = SIZE | {"image_size": 32, "patch_size": 16}
PROCESSING = {"size": {"height": 32, "width": 32}, "resample": 2}
PROCESSING |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3}


def text_config(tokenizer: Any, **changes: object) -> dict[str, Any]:
    """A small text tower for this tokenizer."""
    facts = SIZE | SPECIAL | {"vocab_size": len(tokenizer), "max_position_embeddings": 40}
    return {**facts, **changes}


def build_siglip(library: Any, tokenizer: Any) -> tuple[type[DualEncoder], Any]:
    text = text_config(tokenizer, projection_size=32)
    config = library.SiglipConfig(text_config=text, vision_config=VISION)
    return SiglipBackbone, library.SiglipModel(config)


def build_siglip2(library: Any, tokenizer: Any) -> tuple[type[DualEncoder], Any]:
    text = text_config(tokenizer, projection_size=32)
    vision = SIZE | {"patch_size": 16, "num_patches": 4}
    config = library.Siglip2Config(text_config=text, vision_config=vision)
    return Siglip2Backbone, library.Siglip2Model(config)


def build_clip(library: Any, tokenizer: Any) -> tuple[type[DualEncoder], Any]:
    config = library.CLIPConfig(
        text_config=text_config(tokenizer), vision_config=VISION, projection_dim=24
    )
    return CLIPBackbone, library.CLIPModel(config)


def dual(vision: str, text: str, **changes: object) -> Callable[..., Any]:
    """A VisionTextDualEncoder of towers named by their configs."""

    def build(library: Any, tokenizer: Any) -> tuple[type[DualEncoder], Any]:
        image = getattr(library, f"{vision}Config")(**{**VISION, **changes})
        words = getattr(library, f"{text}Config")(**text_config(tokenizer))
        config = library.VisionTextDualEncoderConfig.from_vision_text_configs(
            image, words, projection_dim=24
        )
        return VisionTextBackbone, library.VisionTextDualEncoderModel(config)

    return build


FAMILIES: Mapping[str, Callable[..., Any]] = {
    "clip": build_clip,
    "siglip": build_siglip,
    "siglip2": build_siglip2,
    "vit+bert": dual("ViT", "Bert"),
    "deit+roberta": dual("DeiT", "Roberta"),
    "dinov2+bert": dual("Dinov2", "Bert", mlp_ratio=2),
    "swiglu+bert": dual("Dinov2", "Bert", use_swiglu_ffn=True, mlp_ratio=2),
    "clip+roberta": dual("CLIPVision", "Roberta"),
}


def letter_tokenizer(library: Any) -> Any:
    """SigLIP 2's tokenizer with letters as its vocabulary; it pads on the left."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *"▁abcdefghijklmnopqrstuvwxyz.,"]
    return library.Siglip2Tokenizer(vocab={token: n for n, token in enumerate(tokens)}, merges=[])


def build(name: str, tokenizer: Any, seed: int = 0) -> DualEncoder:
    """A backbone of a family; the tokenizer is the embedded backbone's."""
    library = import_transformers()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if name == "siglip2":  # transformers loads no other tokenizer with such a model
            tokenizer = letter_tokenizer(library)
        family, model = FAMILIES[name](library, tokenizer)
        for weight in model.parameters():  # no weight that hides a mistake behind a zero or a one
            weight.data += 0.05 * torch.randn_like(weight)
        model.logit_scale.data.fill_(3.0)
    return family(model, tokenizer, PROCESSING, name)
