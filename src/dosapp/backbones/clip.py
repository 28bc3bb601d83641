"""CLIP from Hugging Face `transformers`, as a `Backbone`.

The blocks of `CLIPModel` are run by tower.py, because prompts, shared prefixes and a shared trunk
enter between them; a test compares the features with the library's own. `transformers` is imported
late, because that takes seconds.
"""

import copy
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize

from dosapp.backbones.base import Captions, Pixels, TowerHooks, TrunkOutput
from dosapp.backbones.tower import (
    Tokens,
    apply_attention,
    apply_block,
    checkpoint_activations,
    compile_block,
    run_blocks,
)
from dosapp.data.preprocess import Preprocess
from dosapp.errors import InputError
from dosapp.runtime.devices import resolve_device
from dosapp.runtime.process_memory import retain_freed_memory
from dosapp.settings import LearnerSettings

P = ParamSpec("P")
T = TypeVar("T")

if TYPE_CHECKING:
    from transformers import CLIPModel

TRUNK = re.compile(
    r"(vision|text)_model\.(embeddings|pre_layrnorm|encoder\.layers\.0\.(self_attn|layer_norm1))\."
)
MIN_SHARED_CAPTIONS = 4  # from which number on a common beginning is computed once

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
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def import_transformers() -> Any:
    """Import the library, or raise one sentence about why that fails."""
    try:
        import transformers
        from transformers import CLIPModel  # noqa: F401  (fails late if torchvision is broken)
    except Exception as error:
        raise InputError(
            f"transformers cannot be imported ({type(error).__name__}: {error}); if the installed "
            "torchvision does not match your torch, 'pip uninstall torchvision' helps"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers


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


class CLIPBackbone:
    """A `CLIPModel` with its tokenizer and image preprocessing.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        processing: Size, resampling, mean and standard deviation of its image processor.
        name: How it was asked for.
    """

    def __init__(
        self, model: "CLIPModel", tokenizer: Any, processing: Mapping[str, Any], name: str
    ) -> None:
        self.model, self.tokenizer, self.name = model.eval(), tokenizer, name
        self.processing = dict(processing)
        self.revision = 0
        vision = model.config.vision_config
        self.image_size: int = vision.image_size
        self.hidden_size: int = vision.hidden_size
        self.num_blocks: int = vision.num_hidden_layers
        self.embed_dim: int = model.config.projection_dim
        size, resample = self.processing["size"], self.processing["resample"]
        self.preprocess = Preprocess(self.image_size, size, resample)
        self.image_mean = torch.tensor(self.processing["image_mean"]).view(3, 1, 1)
        self.image_std = torch.tensor(self.processing["image_std"]).view(3, 1, 1)
        self._token_ids: dict[str, list[int]] = {}  # by caption
        self._precision, self._microbatch, self._block = torch.float32, 0, apply_block

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
        scale: Tensor = self.model.logit_scale.exp()
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
        vision = self.model.vision_model
        if isinstance(pixels, TrunkOutput):
            tokens = pixels.tokens if hooks is None else self._embed_patches(pixels.inputs, hooks)
        else:
            tokens = self._embed_patches(pixels, hooks)
        pooled: Tensor = vision.post_layernorm(
            run_blocks(vision.encoder.layers, tokens, hooks, self._block)
        )
        return pooled.to(self.logit_scale)

    def _embed_patches(self, pixels: Tensor, hooks: TowerHooks | None = None) -> Tokens:
        vision, pixels = self.model.vision_model, pixels.to(self.logit_scale)
        mean, std = self.image_mean.to(pixels), self.image_std.to(pixels)
        rows = vision.embeddings((pixels - mean) / std)  # [B, 1 + patches, W]
        if hooks is not None and hooks.prompts is not None:
            rows = torch.cat([rows[:, :1], hooks.prompts, rows[:, 1:]], dim=1)
        first = rows.new_zeros(rows.shape[0], dtype=torch.long)  # (an exporter follows shapes only)
        return Tokens(vision.pre_layrnorm(rows), read_at=first)

    @use_precision
    def project_image(self, pooled: Tensor) -> Tensor:
        return normalize(self.model.visual_projection(pooled).to(self.logit_scale), dim=-1)

    @use_precision
    def encode_text(self, captions: Captions) -> Tensor:
        text = self.model.text_model
        if isinstance(captions, TrunkOutput):
            tokens = captions.tokens
        else:
            tokens = self._embed_captions(captions)
        pooled = run_blocks(text.encoder.layers, tokens, block=self._block)
        projected = self.model.text_projection(text.final_layer_norm(pooled))
        return normalize(projected.to(self.logit_scale), dim=-1)

    def _embed_captions(self, captions: Sequence[str]) -> Tokens:
        text = self.model.text_model
        ids = self.tokenize(captions).to(self.logit_scale.device)  # [C, L]
        # The end token is the highest id where the config predates the explicit one (its value: 2).
        is_legacy = text.eos_token_id == 2
        end = (ids if is_legacy else (ids == text.eos_token_id).int()).argmax(dim=1)
        rows = text.embeddings(ids)  # [C, L, W]
        equal = int((ids == ids[0]).all(dim=0).cumprod(dim=0).sum())  # tokens all begin with
        common = min(equal, int(end.min())) if len(ids) >= MIN_SHARED_CAPTIONS else 0
        prefix = rows[:1, :common] if common else None
        return Tokens(rows[:, common:], end - common, prefix, causal=True)

    @use_precision
    def encode_image_trunk(self, pixels: Tensor) -> TrunkOutput[Tensor]:
        first = self.model.vision_model.encoder.layers[0]
        return TrunkOutput(pixels, apply_attention(first, self._embed_patches(pixels)))

    @use_precision
    def encode_text_trunk(self, captions: Sequence[str]) -> TrunkOutput[Sequence[str]]:
        first = self.model.text_model.encoder.layers[0]
        return TrunkOutput(captions, apply_attention(first, self._embed_captions(captions)))

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        """Token ids `[C, L]`, padded to the longest caption only.

        Attention is causal and the feature is read at the end token, so further padding would
        change nothing.
        """
        new = [caption for caption in dict.fromkeys(captions) if caption not in self._token_ids]
        if new:
            limit = self.model.config.text_config.max_position_embeddings
            ids = self.tokenizer(new, truncation=True, max_length=limit)["input_ids"]
            self._token_ids.update(zip(new, ids, strict=True))
        rows = [self._token_ids[caption] for caption in captions]
        length = max(len(row) for row in rows)
        pad = self.tokenizer.pad_token_id
        return torch.tensor([row + [pad] * (length - len(row)) for row in rows])

    # Weights

    def weights(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def tower_weights(self) -> dict[str, nn.Parameter]:
        return self.weights()

    def trunk_weights(self) -> dict[str, nn.Parameter]:
        return {n: w for n, w in self.weights().items() if TRUNK.match(n)}

    def first_mlp_weights(self) -> dict[str, nn.Parameter]:
        return {n: w for n, w in self.weights().items() if n.endswith(".mlp.fc1.weight")}

    def spu_extra_weights(self) -> dict[str, nn.Parameter]:
        return {
            name: weight
            for name, weight in self.weights().items()
            if name.endswith(".mlp.fc1.bias") or name == "visual_projection.weight"
        }

    def linear_weights(self) -> dict[str, nn.Parameter]:
        ends = ("_proj.weight", ".fc1.weight", ".fc2.weight")
        return {n: w for n, w in self.weights().items() if ".layers." in n and n.endswith(ends)}

    def projection_weights(self) -> dict[str, nn.Parameter]:
        return {n: w for n, w in self.weights().items() if n.endswith("_projection.weight")}

    def image_norm_weights(self) -> dict[str, nn.Parameter]:
        modules = self.model.vision_model.named_modules()
        norms = [name for name, module in modules if isinstance(module, nn.LayerNorm)]
        weights = self.weights()
        return {
            name: weights[name]
            for norm in norms
            for name in (f"vision_model.{norm}.weight", f"vision_model.{norm}.bias")
        }

    def shared_copy(self, unshared: Collection[str] = ()) -> "CLIPBackbone":
        tensors = [*self.model.parameters(), *self.model.buffers()]
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model, {id(tensor): tensor for tensor in tensors})
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
            "image_processor_type": "CLIPImageProcessor",
            "do_center_crop": True,
            "crop_size": {"height": self.image_size, "width": self.image_size},
            **self.processing,
        }
        text = json.dumps(config, indent=2) + "\n"
        (folder / "preprocessor_config.json").write_text(text)


def read_preprocessing(source: str, revision: str | None = None) -> dict[str, Any]:
    """Size, resampling, mean and standard deviation, from either file that transformers uses."""
    find_file = partial(import_transformers().utils.cached_file, revision=revision)
    try:
        config = json.loads(Path(find_file(source, "preprocessor_config.json")).read_text())
    except OSError:
        config = json.loads(Path(find_file(source, "processor_config.json")).read_text())
        config = config["image_processor"]
    size = config["size"]
    return {
        "size": {"shortest_edge": size} if isinstance(size, int) else dict(size),
        "resample": int(config.get("resample", Image.Resampling.BICUBIC)),
        "image_mean": list(config.get("image_mean") or MEAN),
        "image_std": list(config.get("image_std") or STD),
    }
