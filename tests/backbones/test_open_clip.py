"""Checkpoints of open_clip: features equal a plain forward pass with its parameter names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import conv2d, gelu, layer_norm, linear, normalize

from dosapp.backbones.names import HUB_IDS, Source, find_source, join_open_clip_names
from dosapp.backbones.registry import load_backbone
from dosapp.errors import InputError

WIDTH, LAYERS, EMBED, LENGTH, VOCABULARY = 128, 2, 24, 40, 419
VISION = {"image_size": 32, "layers": LAYERS, "width": WIDTH, "patch_size": 16}
TEXT = {"context_length": LENGTH, "vocab_size": VOCABULARY, "width": WIDTH, "heads": 2}
TEXT |= {"layers": LAYERS}


def open_clip_weights(seed: int = 0) -> dict[str, Tensor]:
    """Random weights, with the names and shapes of open_clip's CLIP."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return 0.2 * torch.randn(*shape, generator=generator)

    weights = {
        "logit_scale": torch.tensor(3.0),
        "visual.class_embedding": draw(WIDTH),
        "visual.conv1.weight": draw(WIDTH, 3, 16, 16),
        "visual.positional_embedding": draw(5, WIDTH),
        "visual.proj": draw(WIDTH, EMBED),
        "token_embedding.weight": draw(VOCABULARY, WIDTH),
        "positional_embedding": draw(LENGTH, WIDTH),
        "text_projection": draw(WIDTH, EMBED),
    }
    norms = ["visual.ln_pre", "visual.ln_post", "ln_final"]
    for tower in ("visual.", ""):
        for n in range(LAYERS):
            block = f"{tower}transformer.resblocks.{n}"
            norms += [f"{block}.ln_1", f"{block}.ln_2"]
            weights |= {
                f"{block}.attn.in_proj_weight": draw(3 * WIDTH, WIDTH),
                f"{block}.attn.in_proj_bias": draw(3 * WIDTH),
            }
            layers = {"attn.out_proj": (WIDTH, WIDTH), "mlp.c_fc": (4 * WIDTH, WIDTH)}
            for name, shape in (layers | {"mlp.c_proj": (WIDTH, 4 * WIDTH)}).items():
                weights[f"{block}.{name}.weight"] = draw(*shape)
                weights[f"{block}.{name}.bias"] = draw(shape[0])
    for norm in norms:
        weights |= {f"{norm}.weight": 1 + draw(WIDTH), f"{norm}.bias": draw(WIDTH)}
    return weights


class PlainCLIP:
    """open_clip's forward pass, written out."""

    def __init__(self, weights: dict[str, Tensor], quick_gelu: bool) -> None:
        self.weights, self.quick_gelu = weights, quick_gelu

    def norm(self, x: Tensor, name: str) -> Tensor:
        return layer_norm(x, (WIDTH,), self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def linear(self, x: Tensor, name: str, leaf: str = ".") -> Tensor:
        return linear(x, self.weights[f"{name}{leaf}weight"], self.weights[f"{name}{leaf}bias"])

    def blocks(self, x: Tensor, prefix: str, mask: Tensor | float) -> Tensor:
        for n in range(LAYERS):
            block = f"{prefix}transformer.resblocks.{n}"
            mixed = self.linear(self.norm(x, f"{block}.ln_1"), f"{block}.attn", ".in_proj_")
            parts = (t.unflatten(-1, (2, 64)).transpose(1, 2) for t in mixed.chunk(3, dim=-1))
            query, key, value = parts
            shares = (query @ key.mT / 8 + mask).softmax(dim=-1)
            attended = (shares @ value).transpose(1, 2).flatten(2)
            x = x + self.linear(attended, f"{block}.attn.out_proj")
            hidden = self.linear(self.norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")
            active = hidden * torch.sigmoid(1.702 * hidden) if self.quick_gelu else gelu(hidden)
            x = x + self.linear(active, f"{block}.mlp.c_proj")
        return x

    def encode_image(self, normalised: Tensor) -> Tensor:
        w = self.weights
        patches = conv2d(normalised, w["visual.conv1.weight"], stride=16).flatten(2).mT
        first = w["visual.class_embedding"].expand(len(patches), 1, -1)
        x = torch.cat([first, patches], dim=1) + w["visual.positional_embedding"]
        x = self.blocks(self.norm(x, "visual.ln_pre"), "visual.", 0.0)
        return normalize(self.norm(x[:, 0], "visual.ln_post") @ w["visual.proj"], dim=-1)

    def encode_text(self, ids: Tensor) -> Tensor:
        w = self.weights
        x = w["token_embedding.weight"][ids] + w["positional_embedding"]
        x = self.norm(self.blocks(x, "", torch.full((LENGTH, LENGTH), -1e9).triu(1)), "ln_final")
        return normalize(
            x[torch.arange(len(ids)), ids.argmax(dim=1)] @ w["text_projection"], dim=-1
        )


def write_checkpoint(folder: Path, tokenizer: Any, **changes: Any) -> dict[str, Tensor]:
    """A folder as open_clip's `push_to_hf_hub` writes it."""
    folder.mkdir()
    weights = open_clip_weights()
    save_file(weights, folder / "open_clip_model.safetensors")
    model = {"embed_dim": EMBED, "vision_cfg": VISION, "text_cfg": TEXT} | changes
    preprocess = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "interpolation": "bilinear"}
    config = {"model_cfg": model, "preprocess_cfg": preprocess | {"resize_mode": "squash"}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    return weights


@pytest.mark.parametrize("quick_gelu", [True, False])
@pytest.mark.parametrize("prefix", ["", "text."])  # CustomTextCLIP stores its text tower so
def test_features_equal_those_of_open_clip(loaded_tiny, tmp_path, quick_gelu, prefix) -> None:
    folder = tmp_path / "model"
    weights = write_checkpoint(folder, loaded_tiny.tokenizer, quick_gelu=quick_gelu)
    if prefix:
        renamed = {
            n if n.startswith(("visual.", "logit_scale")) else prefix + n: t
            for n, t in weights.items()
        }
        save_file(renamed, folder / "open_clip_model.safetensors")
    backbone = load_backbone(str(folder))
    assert backbone.preprocess.size == {"height": 32, "width": 32}
    assert backbone.preprocess.resample == 2
    plain = PlainCLIP(weights, quick_gelu)
    pixels = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])
    normalised = (pixels - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    captions = [f"a photo of a {name}." for name in ("red plain circle", "star", "heart", "dog")]
    ids = torch.zeros(4, LENGTH, dtype=torch.long)
    tokens = backbone.tokenize(captions)
    ids[:, : tokens.shape[1]] = tokens
    with torch.no_grad():
        torch.testing.assert_close(
            backbone.encode_image(pixels), plain.encode_image(normalised), atol=2e-6, rtol=1e-4
        )
        torch.testing.assert_close(
            backbone.encode_text(captions), plain.encode_text(ids), atol=2e-6, rtol=1e-4
        )


def test_what_cannot_be_converted_is_one_sentence(loaded_tiny, tmp_path) -> None:
    timm = VISION | {"timm_model_name": "vit_base_patch16_224"}
    write_checkpoint(tmp_path / "timm", loaded_tiny.tokenizer, vision_cfg=timm)
    with pytest.raises(InputError, match="with timm_model_name, which CLIPModel has not"):
        load_backbone(str(tmp_path / "timm"))
    deeper = VISION | {"layers": 3}
    write_checkpoint(tmp_path / "deeper", loaded_tiny.tokenizer, vision_cfg=deeper)
    with pytest.raises(InputError, match=r"do not fit its open_clip_config\.json"):
        load_backbone(str(tmp_path / "deeper"))
    write_checkpoint(tmp_path / "pickled", loaded_tiny.tokenizer)
    (tmp_path / "pickled" / "open_clip_model.safetensors").unlink()
    with pytest.raises(InputError, match="pickled files are not read"):
        load_backbone(str(tmp_path / "pickled"))


def test_names_of_openai_open_clip_and_the_hub(tmp_path) -> None:
    base = Source(HUB_IDS["ViT-B-16"])
    for name in ("ViT-B-16", "ViT-B/16", "ViT-B-16-quickgelu", "openai/clip-vit-base-patch16"):
        assert find_source(name) == base
    assert find_source("hf-hub:facebook/metaclip-b16-400m@abc") == Source(
        "facebook/metaclip-b16-400m", revision="abc"
    )
    assert find_source(f"local-dir:{tmp_path}") == Source(str(tmp_path), is_folder=True)
    assert join_open_clip_names("ViT-B/16", "metaclip_400m") == "facebook/metaclip-b16-400m"
    assert join_open_clip_names("ViT-B/16", None) == "ViT-B-16"
    with pytest.raises(InputError, match="did you mean 'laion2b_s34b_b88k'"):
        join_open_clip_names("ViT-B-16", "laion2b_s34b_b88")
    with pytest.raises(InputError, match="does not exist"):
        find_source("local-dir:/no/such/folder")
