"""L2P: a pool of prompts that join the patch tokens, selected for each image by key."""

from dataclasses import replace

from pydantic import PositiveInt
from torch import Tensor

from dosapp.backbones.base import Backbone, Pixels, TowerHooks
from dosapp.methods.base import method_dataclass
from dosapp.methods.prompt_tuning import KeyedPrompts, PromptMethod, uniform
from dosapp.runtime.rng import torch_rng


class PromptPool(KeyedPrompts):
    """The prompts of an image's `top_k` nearest keys join its patch tokens."""

    keys = "l2p.keys"

    def __init__(
        self,
        inner: Backbone,
        *,
        pool_size: int,
        prompt_length: int,
        top_k: int,
        batchwise: bool = False,
        seed: int = 0,
    ) -> None:
        generator = torch_rng("l2p", seed)
        added = {
            "l2p.prompts": uniform(generator, pool_size, prompt_length, inner.hidden_size),
            self.keys: uniform(generator, pool_size, inner.embed_dim),
        }
        super().__init__(inner, added)
        self.top_k, self.batchwise = top_k, batchwise

    def select_keys(self, similarities: Tensor) -> Tensor:
        """Key indices `[B, top_k]`; batchwise: the most frequent ones of the batch for all."""
        selected = similarities.topk(self.top_k, dim=1).indices
        if self.batchwise:
            counts = selected.flatten().bincount(minlength=similarities.shape[1])
            selected = counts.topk(self.top_k).indices.expand(len(similarities), -1)
        return selected

    def pool_image(self, pixels: Pixels, hooks: TowerHooks | None = None) -> Tensor:
        similarities = self.similarities(pixels)
        selected = self.select_keys(similarities)
        self.key_similarity = similarities.gather(1, selected).sum(dim=1)
        prompts = self.added["l2p.prompts"][selected].flatten(1, 2)  # [B, top_k · length, W]
        return self.inner.pool_image(pixels, replace(hooks or TowerHooks(), prompts=prompts))


@method_dataclass
class L2P(PromptMethod):
    """Learning to prompt; the towers stay frozen."""

    summary = "a pool of prompts beside the patches, selected for each image by key"
    reference = "Wang et al., 2022"
    old_names = {**PromptMethod.old_names, "top_k": "take", "batchwise_prompt": "together"}

    top_k: PositiveInt = 5  # N: prompts per image
    batchwise_prompt: bool = False  # select for the whole batch, as the released code

    def __post_init__(self) -> None:
        if self.top_k > self.pool_size:
            raise ValueError(
                f"cannot select top_k {self.top_k} of {self.pool_size} prompts; give at most "
                "pool_size"
            )

    def wrap_backbone(self, backbone: Backbone, seed: int) -> Backbone:
        return PromptPool(
            backbone,
            pool_size=self.pool_size,
            prompt_length=self.prompt_length,
            top_k=self.top_k,
            batchwise=self.batchwise_prompt,
            seed=seed,
        )
