"""A CLIP of any size with random weights, and prompts of 12 tokens: nothing is downloaded."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dosapp.backbones.clip import MEAN, STD, CLIPBackbone, import_transformers
from dosapp.runtime.rng import torch_rng

WORDS, LENGTH = 4, 12  # tokens every prompt begins with, after the start; tokens in all


class Tokenizer:
    """`class 7` → start, four common words, six of its own, end; the last two ids are the ends."""

    pad_token_id = 0

    def __init__(self, vocabulary: int) -> None:
        self.end, self.words = vocabulary - 1, vocabulary - 2

    def __call__(self, captions: Sequence[str], **_: object) -> Mapping[str, list[list[int]]]:
        common = self._ids("common", WORDS)
        own = [self._ids(caption, LENGTH - WORDS - 2) for caption in captions]
        return {"input_ids": [[self.end - 1, *common, *ids, self.end] for ids in own]}

    def _ids(self, word: str, count: int) -> list[int]:
        generator = torch_rng("bench", word)
        found: list[int] = torch.randint(1, self.words, (count,), generator=generator).tolist()
        return found


def vit_b_16() -> dict[str, Any]:
    """The paper's backbone, as transformers configures it by default, with patches of 16."""
    return {"vision_config": {"patch_size": 16}}


def small() -> dict[str, Any]:
    """The same kind of model, for checks in double precision."""
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "vocab_size": 64, "eos_token_id": 63, "bos_token_id": 62}
    vision = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 16}
    return {"text_config": text, "vision_config": vision, "projection_dim": 24}


def middle() -> dict[str, Any]:
    """Large enough for ratios, small enough for a minute."""
    text = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    vision = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4}
    text |= {"num_attention_heads": 4, "vocab_size": 512, "eos_token_id": 511, "bos_token_id": 510}
    vision |= {"num_attention_heads": 4, "image_size": 96, "patch_size": 16}
    return {"text_config": text, "vision_config": vision, "projection_dim": 128}


MODELS = {"ViT-B-16": vit_b_16, "middle": middle, "small": small}


def random_clip(config: Mapping[str, Any], seed: int = 0) -> CLIPBackbone:
    library = import_transformers()
    made = library.CLIPConfig(**config)
    tokenizer = Tokenizer(made.text_config.vocab_size)
    made.text_config.eos_token_id = tokenizer.end
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = library.CLIPModel(made)
    processing = {
        "size": {"shortest_edge": made.vision_config.image_size},
        "resample": 3,
        "image_mean": MEAN,
        "image_std": STD,
    }
    return CLIPBackbone(model, tokenizer, processing, "random")


def pictures(count: int, pixels: int, word: str = "pictures") -> Tensor:
    return torch.rand(count, 3, pixels, pixels, generator=torch_rng("bench", word))
