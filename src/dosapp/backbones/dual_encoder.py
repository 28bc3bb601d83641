"""A dual encoder of `transformers` as a `Backbone`, whatever its family.

A family (clip.py, siglip.py, vision_text.py) says what its two towers are. tower.py runs them,
because prompts, shared prefixes and a shared trunk enter between the blocks; tests compare the
features with the library's own. `transformers` is imported late, because that takes seconds.
"""

import copy
import hashlib
import json
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dosapp.backbones.base import Captions, Pixels, TowerHooks, TrunkOutput
from dosapp.backbones.tower import (
    ImageTower,
    TextTower,
    Tokens,
    apply_attention,
    apply_block,
    checkpoint_activations,
    compile_block,
    run_blocks,
)
from dosapp.data.preprocess import Preprocess
from dosapp.runtime.devices import resolve_device
from dosapp.runtime.process_memory import retain_freed_memory
from dosapp.settings import LearnerSettings

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D", bound="DualEncoder")

MIN_SHARED_CAPTIONS = 4  # from which number on a common beginning is computed once
UNUSED = ("logit_bias", "mask_token")  # weights that no feature and no loss of ours depends on

# Fields of a config that change the output; the others (library version, initialisation) do not.
BEHAVIOUR_FIELDS = (
    "hidden_act",
    "layer_norm_eps",
    "num_attention_heads",
    "num_hidden_layers",
    "patch_size",
    "image_size",
    "eos_token_id",
)


def use_precision(encode: Callable[P, T]) -> Callable[P, T]:
    """Decorate an encoder: matrix products in the backbone's precision."""

    @wraps(encode)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        backbone: Any = args[0]
        if backbone._precision is torch.float32:
            return encode(*args, **kwargs)
        with torch.autocast(backbone.logit_scale.device.type, backbone._precision):
            return encode(*args, **kwargs)

    return wrapped


class DualEncoder:
    """A model of two towers with its tokenizer and image preprocessing.

    A subclass describes the towers of its family. The modules they name may be any modules of the
    model; `logit_scale`, `vision_model` and `text_model` are where CLIP has them.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        processing: Size, resampling, mean and standard deviation of its image processor.
        name: How it was asked for.
    """

    model_class: ClassVar[str]  # the class of transformers
    image_processor: ClassVar[str] = "CLIPImageProcessor"  # written by `save`

    def __init__(
        self, model: Any, tokenizer: Any, processing: Mapping[str, Any], name: str
    ) -> None:
        self.model, self.tokenizer, self.name = model.eval(), tokenizer, name
        self.revision = 0
        self.describe_towers()
        self.hidden_size: int = self.image.blocks[0].query.in_features
        self.num_blocks: int = len(self.image.blocks)
        self.embed_dim: int = self._output_size()
        self.image_size, self.processing = self._check_processing(processing)
        size, resample = self.processing["size"], self.processing["resample"]
        self.preprocess = Preprocess(self.image_size, size, resample)
        self.image_mean = torch.tensor(self.processing["image_mean"]).view(3, 1, 1)
        self.image_std = torch.tensor(self.processing["image_std"]).view(3, 1, 1)
        self._token_ids: dict[str, list[int]] = {}  # by caption
        self._precision, self._microbatch, self._block = torch.float32, 0, apply_block

    # What a family says

    def describe_image(self, model: Any) -> ImageTower:
        """The image tower of a model of this family."""
        raise NotImplementedError

    def describe_text(self, model: Any) -> TextTower:
        """The text tower of a model of this family."""
        raise NotImplementedError

    def describe_towers(self) -> None:
        """Describe both towers; to be called again after a module was replaced."""
        self.image: ImageTower = self.describe_image(self.model)
        self.text: TextTower = self.describe_text(self.model)

    def _output_size(self) -> int:
        """D: that of the last linear layer of the text tower."""
        projection = self.text.projection
        linear = [m for m in projection.modules() if isinstance(m, nn.Linear)]
        return linear[-1].out_features if linear else self.text.blocks[0].query.in_features

    def _check_processing(self, given: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """The size of an image and the preprocessing, with a warning where it cannot be right."""
        processing, size = dict(given), self.image.image_size
        crop = processing.pop("crop_size", size)
        crop = crop["height"] if isinstance(crop, Mapping) else crop
        if crop != size and self.image.resizable:
            size = processing["crop_size"] = crop
        elif crop != size:
            warnings.warn(
                f"the preprocessing of '{self.name}' crops to {crop} px, but the model takes "
                f"{size} px: {size} is used; check its preprocessor_config.json",
                stacklevel=4,
            )
        processing["size"] = processing["size"] or {"height": size, "width": size}
        if min(processing["size"].values()) < size:
            warnings.warn(
                f"the preprocessing of '{self.name}' resizes to {processing['size']}, less than "
                f"the {size} px of the model: a black border is added; check its "
                "preprocessor_config.json",
                stacklevel=4,
            )
        return size, processing

    def configure(self, settings: LearnerSettings) -> None:
        device = resolve_device(settings.device)
        if device.type == "cpu":
            retain_freed_memory()
        self.model.to(device)
        self._precision = getattr(torch, settings.precision)
        self._microbatch = settings.microbatch
        block = compile_block(apply_block) if settings.compile else apply_block
        self._block = checkpoint_activations(block) if settings.gradient_checkpointing else block

    @property
    def is_compiled(self) -> bool:
        """Whether the blocks run through torch.compile."""
        return "_torchdynamo" in str(vars(self._block))

    # Features

    @property
    def logit_scale(self) -> Tensor:
        scale: Tensor = self.model.logit_scale.exp().squeeze()
        return scale

    def encode_image(self, pixels: Pixels, hooks: TowerHooks | None = None) -> Tensor:
        return self.project_image(self.pool_image(pixels, hooks))

    def pool_image(self, pixels: Pixels, hooks: TowerHooks | None = None) -> Tensor:
        """Encode in microbatches, each recomputed in the backward pass.

        The gradient is that of the whole batch's loss, which a sum of microbatch losses would not
        give. Hooks are made for the whole batch, so with them there is only one.
        """
        size = self._microbatch
        if not size or hooks is not None or len(pixels) <= size:
            return self._pool_microbatch(pixels, hooks)
        parts = [pixels[first : first + size] for first in range(0, len(pixels), size)]
        return torch.cat([checkpoint_activations(self._pool_microbatch)(part) for part in parts])

    @use_precision
    def _pool_microbatch(self, pixels: Pixels, hooks: TowerHooks | None = None) -> Tensor:
        if isinstance(pixels, TrunkOutput):
            tokens = pixels.tokens if hooks is None else self._embed_patches(pixels.inputs, hooks)
        else:
            tokens = self._embed_patches(pixels, hooks)
        pooled = self.image.pool(run_blocks(self.image.blocks, tokens, hooks, self._block))
        return pooled.to(self.logit_scale)

    def _embed_patches(self, pixels: Tensor, hooks: TowerHooks | None = None) -> Tokens:
        tower, pixels = self.image, pixels.to(self.logit_scale)
        mean, std = self.image_mean.to(pixels), self.image_std.to(pixels)
        rows = tower.embed((pixels - mean) / std)  # [B, L, W]
        if hooks is not None and hooks.prompts is not None:
            before, patches = rows[:, : tower.first_patch], rows[:, tower.first_patch :]
            rows = torch.cat([before, hooks.prompts, patches], dim=1)
        return Tokens(tower.tokens_norm(rows), tower.read_at(rows))

    @use_precision
    def project_image(self, pooled: Tensor) -> Tensor:
        return normalize(self.image.projection(pooled).to(self.logit_scale), dim=-1)

    @use_precision
    def encode_text(self, captions: Captions) -> Tensor:
        if isinstance(captions, TrunkOutput):
            tokens = captions.tokens
        else:
            tokens = self._embed_captions(captions)
        read = run_blocks(self.text.blocks, tokens, apply=self._block)
        projected = self.text.projection(self.text.pool(read))
        return normalize(projected.to(self.logit_scale), dim=-1)

    def _embed_captions(self, captions: Sequence[str]) -> Tokens:
        tower = self.text
        ids = self.tokenize(captions).to(self.logit_scale.device)  # [C, L]
        read_at, rows = tower.read_at(ids), tower.embed(ids)  # [C], [C, L, W]
        if tower.causal:
            return self._share_beginning(ids, rows, read_at)
        is_text = None if tower.pad_to_max_length else ids != self.tokenizer.pad_token_id
        return Tokens(rows, read_at, is_text=is_text)

    def _share_beginning(self, ids: Tensor, rows: Tensor, read_at: Tensor | None) -> Tokens:
        """Captions of a causal tower: the tokens that all of them begin with are stored once."""
        assert read_at is not None
        equal = int((ids == ids[0]).all(dim=0).cumprod(dim=0).sum())  # tokens all begin with
        common = min(equal, int(read_at.min())) if len(ids) >= MIN_SHARED_CAPTIONS else 0
        prefix = rows[:1, :common] if common else None
        return Tokens(rows[:, common:], read_at - common, prefix, causal=True)

    @use_precision
    def encode_image_trunk(self, pixels: Tensor) -> TrunkOutput[Tensor]:
        tokens = apply_attention(self.image.blocks[0], self._embed_patches(pixels))
        return TrunkOutput(pixels, tokens)

    @use_precision
    def encode_text_trunk(self, captions: Sequence[str]) -> TrunkOutput[Sequence[str]]:
        tokens = apply_attention(self.text.blocks[0], self._embed_captions(captions))
        return TrunkOutput(captions, tokens)

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        """Token ids `[C, L]`, padded to the longest caption or to what the tower needs.

        Where attention is causal, or padding is masked, further padding would change nothing.
        """
        tower = self.text
        new = [caption for caption in dict.fromkeys(captions) if caption not in self._token_ids]
        if new:
            ids = self.tokenizer(new, truncation=True, max_length=tower.max_length)["input_ids"]
            self._token_ids.update(zip(new, ids, strict=True))
        rows = [self._token_ids[caption] for caption in captions]
        longest = max(len(row) for row in rows)
        length = tower.max_length if tower.pad_to_max_length else longest
        padding = [[self.tokenizer.pad_token_id] * (length - len(row)) for row in rows]
        pads_left = tower.pad_to_max_length and self.tokenizer.padding_side == "left"
        pairs = zip(rows, padding, strict=True)
        return torch.tensor([pad + row if pads_left else row + pad for row, pad in pairs])

    # Weights

    def weights(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def _weights_of(self, parts: Iterable[nn.Module], leaf: str = "") -> dict[str, nn.Parameter]:
        """The weights of some modules, or those called `leaf`, in the order of the model."""
        chosen = {
            id(weight)
            for part in parts
            for name, weight in part.named_parameters()
            if name.endswith(leaf)
        }
        return {n: w for n, w in self.weights().items() if id(w) in chosen}

    def own_weights(self) -> dict[str, nn.Parameter]:
        return {n: w for n, w in self.weights().items() if not n.endswith(UNUSED)}

    def trunk_weights(self) -> dict[str, nn.Parameter]:
        return self._weights_of([*self.image.trunk_modules(), *self.text.trunk_modules()])

    def _first_mlp_layers(self) -> list[nn.Module]:
        blocks = (*self.image.blocks, *self.text.blocks)
        return [layer for block in blocks for layer in block.first_mlp]

    def first_mlp_weights(self) -> dict[str, nn.Parameter]:
        return self._weights_of(self._first_mlp_layers(), "weight")

    def spu_extra_weights(self) -> dict[str, nn.Parameter]:
        biases = self._weights_of(self._first_mlp_layers(), "bias")
        chosen = biases | self._weights_of([self.image.projection], "weight")
        return {n: w for n, w in self.weights().items() if n in chosen}

    def linear_weights(self) -> dict[str, nn.Parameter]:
        blocks = (*self.image.blocks, *self.text.blocks)
        return self._weights_of([m for b in blocks for m in b.linear_layers()], "weight")

    def projection_weights(self) -> dict[str, nn.Parameter]:
        return self._weights_of([self.image.projection, self.text.projection], "weight")

    def image_norm_weights(self) -> dict[str, nn.Parameter]:
        norms = [m for m in self.image.module.modules() if isinstance(m, nn.LayerNorm)]
        return self._weights_of(norms)

    def shared_copy(self: D, unshared: Collection[str] = ()) -> D:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model, {id(tensor): tensor for tensor in tensors})
        other.describe_towers()
        other.unshare(unshared)
        return other

    def unshare(self, names: Collection[str]) -> None:
        for name in names:
            module_name, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(module_name)
            value = getattr(module, leaf).detach().clone()
            setattr(module, leaf, nn.Parameter(value, requires_grad=False))

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, weight in sorted(self.weights().items()):
            digest.update(name.encode())
            digest.update(weight.detach().cpu().contiguous().numpy().tobytes())
        config = self.model.config
        behaviour = {
            "vision": {k: getattr(config.vision_config, k, None) for k in BEHAVIOUR_FIELDS},
            "text": {k: getattr(config.text_config, k, None) for k in BEHAVIOUR_FIELDS},
            "processing": self.processing,
            "tokens": self.tokenize(["a photo of a red striped triangle."]).tolist(),
        }
        digest.update(json.dumps(behaviour, sort_keys=True, default=str).encode())
        return digest.hexdigest()[:16]

    def save(self, folder: Path) -> None:
        """Write a `save_pretrained` folder, which transformers and `load_backbone` read."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        config = {
            "image_processor_type": self.image_processor,
            "do_center_crop": True,
            "crop_size": {"height": self.image_size, "width": self.image_size},
            **self.processing,
        }
        text = json.dumps(config, indent=2) + "\n"
        (folder / "preprocessor_config.json").write_text(text)
