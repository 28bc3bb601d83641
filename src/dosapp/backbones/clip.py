"""CLIP through Hugging Face `transformers`, behind the `Backbone` protocol.

The adapter walks the blocks of `CLIPModel` itself (blocks.py), because prompts, shared prefixes and
a shared trunk have to enter between them. A test holds it to the library's own forward.
`transformers` is imported late: it costs seconds.
"""

import copy
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
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
    checkpointed,
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
MIN_SHARED_CAPTIONS = 4  # captions from which on a common beginning is read once

# What of a config changes an answer; the rest (library version, initialisation) does not.
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
    """The library, or one sentence about why it cannot be imported."""
    try:
        import transformers as library
        from transformers import CLIPModel  # noqa: F401  (fails late if torchvision is broken)
    except Exception as error:
        raise InputError(
            f"transformers cannot be imported ({type(error).__name__}: {error}); if a torchvision "
            "that does not match your torch is installed, 'pip uninstall torchvision' mends it"
        ) from error
    library.utils.logging.disable_progress_bar()
    return library


def use_precision(encode: Callable[P, T]) -> Callable[P, T]:
    """Products in the backbone's precision."""

    @wraps(encode)
    def wrapped(*args: P.args, **more: P.kwargs) -> T:
        net: Any = args[0]
        if net._precision is torch.float32:
            return encode(*args, **more)
        with torch.autocast(net.logit_scale.device.type, net._precision):
            return encode(*args, **more)

    return wrapped


class CLIPBackbone:
    """A `CLIPModel`, its tokenizer and the way its pictures are prepared."""

    def __init__(
        self, model: "CLIPModel", tokenizer: Any, processing: Mapping[str, Any], name: str
    ) -> None:
        self.model, self.tokenizer, self.name = model.eval(), tokenizer, name
        self.processing = dict(processing)
        self.revision = 0
        vision = model.config.vision_config
        self.image_size: int = vision.image_size
        self.preprocess = Preprocess(
            self.image_size, self.processing["size"], self.processing["resample"]
        )
        self.hidden_size: int = vision.hidden_size
        self.num_blocks: int = vision.num_hidden_layers
        self.embed_dim: int = model.config.projection_dim
        self._mean = torch.tensor(self.processing["image_mean"]).view(3, 1, 1)
        self._std = torch.tensor(self.processing["image_std"]).view(3, 1, 1)
        self._ids: dict[str, list[int]] = {}
        self._precision, self._microbatch, self._through = torch.float32, 0, apply_block

    def configure(self, settings: LearnerSettings) -> None:
        where = resolve_device(settings.device)
        if where.type == "cpu":
            retain_freed_memory()
        self.model.to(where)
        self._precision = getattr(torch, settings.precision)
        self._microbatch = settings.microbatch
        through = compile_block(apply_block) if settings.compile else apply_block
        self._through = checkpointed(through) if settings.gradient_checkpointing else through

    # Features

    @property
    def logit_scale(self) -> Tensor:
        scale: Tensor = self.model.logit_scale.exp()
        return scale

    def encode_image(self, pixels: Pixels, hooks: TowerHooks | None = None) -> Tensor:
        return self.project_image(self.pool_image(pixels, hooks))

    def pool_image(self, pixels: Pixels, hooks: TowerHooks | None = None) -> Tensor:
        """In microbatches, each of which is computed again in the backward: the gradient of the
        whole batch's loss, which sums of losses of parts would not have. What a method inserts is
        made for the whole batch, and goes through with it."""
        size = self._microbatch
        if not size or hooks is not None or len(pixels) <= size:
            return self._pool_image(pixels, hooks)
        parts = [pixels[first : first + size] for first in range(0, len(pixels), size)]
        return torch.cat([checkpointed(self._pool_image)(part) for part in parts])

    @use_precision
    def _pool_image(self, pixels: Pixels, hooks: TowerHooks | None = None) -> Tensor:
        vision = self.model.vision_model
        if isinstance(pixels, TrunkOutput) and hooks is None:
            tokens = pixels.tokens
        else:
            tokens = self._patches(
                pixels.inputs if isinstance(pixels, TrunkOutput) else pixels, hooks
            )
        read = run_blocks(vision.encoder.layers, tokens, hooks, self._through)
        pooled: Tensor = vision.post_layernorm(read)
        return pooled.to(self.logit_scale)

    def _patches(self, pixels: Tensor, hooks: TowerHooks | None = None) -> Tokens:
        vision, pixels = self.model.vision_model, pixels.to(self.logit_scale)
        mean, std = self._mean.to(pixels), self._std.to(pixels)
        rows = vision.embeddings((pixels - mean) / std)  # [B, 1 + patches, W]
        if hooks is not None and hooks.prompts is not None:
            rows = torch.cat([rows[:, :1], hooks.prompts, rows[:, 1:]], dim=1)
        first = rows.new_zeros(rows.shape[0], dtype=torch.long)  # (an exporter follows shapes only)
        return Tokens(vision.pre_layrnorm(rows), at=first)

    @use_precision
    def project_image(self, pooled: Tensor) -> Tensor:
        return normalize(self.model.visual_projection(pooled).to(self.logit_scale), dim=-1)

    @use_precision
    def encode_text(self, captions: Captions) -> Tensor:
        text = self.model.text_model
        tokens = captions.tokens if isinstance(captions, TrunkOutput) else self._words(captions)
        read = run_blocks(text.encoder.layers, tokens, through=self._through)
        projected = self.model.text_projection(text.final_layer_norm(read))
        return normalize(projected.to(self.logit_scale), dim=-1)

    def _words(self, captions: Sequence[str]) -> Tokens:
        ids, text = (
            self.tokens(captions).to(self.logit_scale.device),
            self.model.text_model,
        )  # [C, L]
        # The end token: the highest id where the config predates the explicit one (its value is 2).
        legacy = text.eos_token_id == 2
        end = (ids if legacy else (ids == text.eos_token_id).int()).argmax(dim=1)
        rows = text.embeddings(ids)  # [C, L, W]
        same = int((ids == ids[0]).all(dim=0).cumprod(dim=0).sum())  # words all begin with
        common = min(same, int(end.min())) if len(ids) >= MIN_SHARED_CAPTIONS else 0
        head = rows[:1, :common] if common else None
        return Tokens(rows[:, common:], end - common, head, causal=True)

    @use_precision
    def encode_image_trunk(self, pixels: Tensor) -> TrunkOutput[Tensor]:
        first = self.model.vision_model.encoder.layers[0]
        return TrunkOutput(pixels, apply_attention(first, self._patches(pixels)))

    @use_precision
    def encode_text_trunk(self, captions: Sequence[str]) -> TrunkOutput[Sequence[str]]:
        first = self.model.text_model.encoder.layers[0]
        return TrunkOutput(captions, apply_attention(first, self._words(captions)))

    def tokens(self, captions: Sequence[str]) -> Tensor:
        """Token ids cut to the longest caption in use: attention is causal and the feature is read
        at the end token, so what would come after it changes nothing."""
        new = [caption for caption in dict.fromkeys(captions) if caption not in self._ids]
        if new:
            room = self.model.config.text_config.max_position_embeddings
            read = self.tokenizer(new, truncation=True, max_length=room)["input_ids"]
            self._ids.update(zip(new, read, strict=True))
        rows = [self._ids[caption] for caption in captions]
        length = max(len(row) for row in rows)
        pad = self.tokenizer.pad_token_id
        return torch.tensor([row + [pad] * (length - len(row)) for row in rows])

    # Weights

    def weights(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def trunk_weights(self) -> dict[str, nn.Parameter]:
        return {n: w for n, w in self.weights().items() if TRUNK.match(n)}

    def tower_weights(self) -> dict[str, nn.Parameter]:
        return self.weights()

    def linear_weights(self) -> dict[str, nn.Parameter]:
        ends = ("_proj.weight", ".fc1.weight", ".fc2.weight")
        return {n: w for n, w in self.weights().items() if ".layers." in n and n.endswith(ends)}

    def projection_weights(self) -> dict[str, nn.Parameter]:
        return {n: w for n, w in self.weights().items() if n.endswith("_projection.weight")}

    def first_mlp_weights(self) -> dict[str, nn.Parameter]:
        return {n: w for n, w in self.weights().items() if n.endswith(".mlp.fc1.weight")}

    def spu_extra_weights(self) -> dict[str, nn.Parameter]:
        return {
            name: weight
            for name, weight in self.weights().items()
            if name.endswith(".mlp.fc1.bias") or name == "visual_projection.weight"
        }

    def image_norm_weights(self) -> dict[str, nn.Parameter]:
        norms = [
            name
            for name, module in self.model.vision_model.named_modules()
            if isinstance(module, nn.LayerNorm)
        ]
        weights = self.weights()
        return {
            name: weights[name]
            for norm in norms
            for name in (f"vision_model.{norm}.weight", f"vision_model.{norm}.bias")
        }

    def shared_copy(self, own: Collection[str] = ()) -> "CLIPBackbone":
        tensors = [*self.model.parameters(), *self.model.buffers()]
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model, {id(tensor): tensor for tensor in tensors})
        other.materialize(own)
        return other

    def materialize(self, names: Collection[str]) -> None:
        for name in names:
            module, _, leaf = name.rpartition(".")
            holder = self.model.get_submodule(module)
            mine = getattr(holder, leaf).detach().clone()
            setattr(holder, leaf, nn.Parameter(mine, requires_grad=False))

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, weight in sorted(self.weights().items()):
            digest.update(name.encode())
            digest.update(weight.detach().cpu().contiguous().numpy().tobytes())
        config = self.model.config
        meaning = {
            "vision": {k: getattr(config.vision_config, k, None) for k in BEHAVIOUR_FIELDS},
            "text": {k: getattr(config.text_config, k, None) for k in BEHAVIOUR_FIELDS},
            "processing": self.processing,
            "tokens": self.tokens(["a photo of a red striped triangle."]).tolist(),
        }
        digest.update(json.dumps(meaning, sort_keys=True, default=str).encode())
        return digest.hexdigest()[:16]

    def save(self, folder: Path) -> None:
        """As `save_pretrained` does, so that transformers and `load` read it."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        whole = {
            "image_processor_type": "CLIPImageProcessor",
            "do_center_crop": True,
            "crop_size": {"height": self.image_size, "width": self.image_size},
            **self.processing,
        }
        text = json.dumps(whole, indent=2) + "\n"
        (folder / "preprocessor_config.json").write_text(text)


def read_preprocessing(where: str) -> dict[str, Any]:
    """Size, resampling, mean and std, from either of the files transformers has used for them."""
    find = import_transformers().utils.cached_file
    try:
        found = json.loads(Path(find(where, "preprocessor_config.json")).read_text())
    except OSError:
        found = json.loads(Path(find(where, "processor_config.json")).read_text())
        found = found["image_processor"]
    size = found["size"]
    return {
        "size": {"shortest_edge": size} if isinstance(size, int) else dict(size),
        "resample": int(found.get("resample", Image.Resampling.BICUBIC)),
        "image_mean": list(found.get("image_mean") or MEAN),
        "image_std": list(found.get("image_std") or STD),
    }
