"""A CLIP of any size with random weights, and prompts of 12 tokens: nothing is downloaded."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dosapp.backbones.checkpoint import MEAN, STD, import_transformers
from dosapp.backbones.clip import CLIPBackbone
from dosapp.runtime.rng import torch_rng

PREFIX_LENGTH, LENGTH = 4, 12  # tokens all prompts share after the start token; tokens in all


class RandomTokenizer:
    """Start token, four tokens that all captions share, six of the caption, end token.

    Args:
        vocab_size: The last two ids are the start and the end token.
    """

    pad_token_id = 0

    def __init__(self, vocab_size: int) -> None:
        self.end, self.start = vocab_size - 1, vocab_size - 2

    def __call__(self, captions: Sequence[str], **_: object) -> Mapping[str, list[list[int]]]:
        """Token ids under the key `input_ids`, as tokenizers of transformers return them."""
        prefix = self._ids("common", PREFIX_LENGTH)
        rest = [self._ids(caption, LENGTH - PREFIX_LENGTH - 2) for caption in captions]
        return {"input_ids": [[self.start, *prefix, *ids, self.end] for ids in rest]}

    def _ids(self, text: str, count: int) -> list[int]:
        generator = torch_rng("bench", text)
        ids: list[int] = torch.randint(1, self.start, (count,), generator=generator).tolist()
        return ids


def vit_b_16() -> dict[str, Any]:
    """The paper's backbone: the default configuration of transformers, with patches of 16."""
    return {"vision_config": {"patch_size": 16}}


def small() -> dict[str, Any]:
    """Two blocks per tower, for checks in float64."""
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "vocab_size": 64, "eos_token_id": 63, "bos_token_id": 62}
    vision = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 16}
    return {"text_config": text, "vision_config": vision, "projection_dim": 24}


def middle() -> dict[str, Any]:
    """Four blocks per tower: large enough for ratios, small enough for a minute."""
    text = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    vision = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4}
    text |= {"num_attention_heads": 4, "vocab_size": 512, "eos_token_id": 511, "bos_token_id": 510}
    vision |= {"num_attention_heads": 4, "image_size": 96, "patch_size": 16}
    return {"text_config": text, "vision_config": vision, "projection_dim": 128}


MODELS = {"ViT-B-16": vit_b_16, "middle": middle, "small": small}


def random_clip(config: Mapping[str, Any], seed: int = 0) -> CLIPBackbone:
    """Build a CLIP with random weights.

    Args:
        config: Fields of a `CLIPConfig`.
        seed: Equal seeds give equal weights.

    Returns:
        The backbone, with a `RandomTokenizer`.
    """
    library = import_transformers()
    clip_config = library.CLIPConfig(**config)
    tokenizer = RandomTokenizer(clip_config.text_config.vocab_size)
    clip_config.text_config.eos_token_id = tokenizer.end
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = library.CLIPModel(clip_config)
    processing = {
        "size": {"shortest_edge": clip_config.vision_config.image_size},
        "resample": 3,
        "image_mean": MEAN,
        "image_std": STD,
    }
    return CLIPBackbone(model, tokenizer, processing, "random")


def random_images(count: int, size: int, key: str = "images") -> Tensor:
    """Random pixels in [0, 1], `[count, 3, size, size]`; equal keys give equal images.

    Example:
        >>> random_images(2, 32).shape
        torch.Size([2, 3, 32, 32])
    """
    return torch.rand(count, 3, size, size, generator=torch_rng("bench", key))
