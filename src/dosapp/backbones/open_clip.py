"""Checkpoints of open_clip as a `CLIPModel`: other names, and one matrix for queries, keys, values.

A checkpoint is a folder or a hub id with `open_clip_config.json`, weights as safetensors and the
files of a tokenizer. Image towers of timm and text towers of transformers are refused.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from dosapp.backbones.checkpoint import MEAN, STD, find_file, import_transformers
from dosapp.backbones.names import Source
from dosapp.errors import InputError

CONFIG = "open_clip_config.json"
WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors")
HEAD_WIDTH = 64
LEGACY_END = 2  # of transformers: the end token is the highest id, as in open_clip
VISION_FIELDS = {"image_size", "layers", "width", "patch_size", "head_width", "mlp_ratio"}
TEXT_FIELDS = {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio"}
TEXT_FIELDS |= {"hf_tokenizer_name", "tokenizer_kwargs"}

# open_clip's names → those of transformers, outside the blocks; matrices marked .T are transposed.
TOWER_NAMES = {
    "logit_scale": "logit_scale",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "visual.proj": "visual_projection.weight.T",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final": "text_model.final_layer_norm",
    "text_projection": "text_projection.weight.T",
}
BLOCK_NAMES = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)")


def read_open_clip(source: Source) -> tuple[Any, dict[str, Any]]:
    """Read a checkpoint of open_clip.

    Returns:
        A `CLIPModel`, and its preprocessing as `read_preprocessing` gives it.

    Raises:
        InputError: The architecture is not CLIP's, or there are no safetensors.
    """
    config_file = find_file(source, CONFIG)
    assert config_file is not None
    config = json.loads(config_file.read_text())
    found = (find_file(source, name) for name in WEIGHTS)
    weights = next((file for file in found if file is not None), None)
    if weights is None:
        raise InputError(
            f"'{source.place}' has {CONFIG} but none of {', '.join(WEIGHTS)}; save its weights as "
            "safetensors (pickled files are not read)"
        )
    model = convert_open_clip(load_file(weights), config["model_cfg"], source.place)
    image_size = int(config["model_cfg"]["vision_cfg"]["image_size"])
    return model, _convert_preprocessing(config.get("preprocess_cfg", {}), image_size)


def convert_open_clip(weights: Mapping[str, Tensor], config: Mapping[str, Any], name: str) -> Any:
    """A `CLIPModel` with the weights of a CLIP of open_clip.

    Args:
        weights: open_clip's state dict.
        config: The `model_cfg` of its configuration.
        name: For messages.

    Returns:
        The model, in float32.
    """
    vision, text = dict(config["vision_cfg"]), dict(config["text_cfg"])
    other = [key for key in vision if vision[key] and key not in VISION_FIELDS]
    other += [key for key in text if text[key] and key not in TEXT_FIELDS]
    if other:
        raise InputError(
            f"'{name}' is a model of open_clip with {', '.join(sorted(other))}, which CLIPModel "
            "has not; use its version for transformers, if there is one"
        )
    library = import_transformers()
    activation = "quick_gelu" if config.get("quick_gelu") else "gelu"
    model = library.CLIPModel(
        library.CLIPConfig(
            projection_dim=config["embed_dim"],
            vision_config=_tower_config(vision, activation)
            | {"image_size": vision["image_size"], "patch_size": vision["patch_size"]},
            text_config=_tower_config(text, activation)
            | {"vocab_size": text.get("vocab_size", 49408), "eos_token_id": LEGACY_END}
            | {"max_position_embeddings": text.get("context_length", 77)},
        )
    )
    renamed: dict[str, Tensor] = {}
    for key, tensor in weights.items():
        renamed |= _rename(key.removeprefix("text."), tensor.float())
    missing, unexpected = model.load_state_dict(renamed, strict=False)
    if missing or unexpected:
        raise InputError(
            f"the weights of '{name}' do not fit its {CONFIG}: "
            f"{', '.join([*missing, *unexpected][:3])}"
        )
    return model


def _tower_config(config: Mapping[str, Any], activation: str) -> dict[str, Any]:
    width = config["width"]
    heads = config.get("heads") or width // config.get("head_width", HEAD_WIDTH)
    return {
        "hidden_size": width,
        "intermediate_size": int(width * config.get("mlp_ratio", 4.0)),
        "num_hidden_layers": config["layers"],
        "num_attention_heads": heads,
        "hidden_act": activation,
    }


def _rename(key: str, tensor: Tensor) -> dict[str, Tensor]:
    """One tensor by the names of transformers; queries, keys and values become three."""
    if key == "attn_mask":  # a constant that old files store
        return {}
    match = BLOCK.fullmatch(key)
    if match is None:
        stem, _, leaf = key.rpartition(".")
        name = TOWER_NAMES.get(key) or f"{TOWER_NAMES.get(stem, stem)}.{leaf}"
        return {name.removesuffix(".T"): tensor.T if name.endswith(".T") else tensor}
    tower = "vision_model" if match[1] else "text_model"
    block, rest = f"{tower}.encoder.layers.{match[2]}", match[3]
    if rest.startswith("attn.in_proj_"):
        leaf = rest.removeprefix("attn.in_proj_")
        parts = zip("qkv", tensor.chunk(3), strict=True)
        return {f"{block}.self_attn.{part}_proj.{leaf}": value for part, value in parts}
    stem, _, leaf = rest.rpartition(".")
    return {f"{block}.{BLOCK_NAMES.get(stem, stem)}.{leaf}": tensor}


def _convert_preprocessing(config: Mapping[str, Any], image_size: int) -> dict[str, Any]:
    squashes = config.get("resize_mode", "shortest") == "squash"
    side = {"height": image_size, "width": image_size}
    resample = Image.Resampling[config.get("interpolation", "bicubic").upper()]
    return {
        "size": side if squashes else {"shortest_edge": image_size},
        "resample": int(resample),
        "image_mean": list(config.get("mean", MEAN)),
        "image_std": list(config.get("std", STD)),
    }
