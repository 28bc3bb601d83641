"""CLIP of transformers as a backbone, compared with the library's own features."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from dosapp.backbones.base import TowerHooks
from dosapp.backbones.checkpoint import import_transformers, read_preprocessing
from dosapp.backbones.clip import CLIPBackbone
from dosapp.backbones.names import TINY, find_source
from dosapp.backbones.registry import load_backbone
from dosapp.data.preprocess import to_float
from dosapp.errors import InputError
from dosapp.functional.masks import top_count
from dosapp.methods.dualprompt import PrefixPrompts
from dosapp.methods.l2p import PromptPool
from support.settings import SHARED, shared_only


def test_features_equal_those_of_transformers(tiny) -> None:
    pixels = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    captions = ["a photo of a red plain circle.", "a star.", "one blue striped square in a photo."]
    tokens = tiny.tokenizer(captions, padding="max_length", max_length=32, return_tensors="pt")
    with torch.no_grad():
        output = tiny.model(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            pixel_values=(pixels - tiny.image_mean) / tiny.image_std,
        )
        torch.testing.assert_close(tiny.encode_image(pixels), output.image_embeds)
        torch.testing.assert_close(tiny.encode_text(captions), output.text_embeds)


def test_captions_are_padded_to_the_longest_only(tiny) -> None:
    short, long = "a star.", "one blue striped square in a photo, quite far away."
    alone = tiny.encode_text([short])
    torch.testing.assert_close(tiny.encode_text([short, long])[0], alone[0])
    assert tiny.tokenize([short]).shape[1] < tiny.tokenize([long]).shape[1] <= 32


def test_a_common_prefix_is_computed_once_and_changes_nothing(tiny) -> None:
    """Features and gradients, with captions of other lengths and one that is only the prefix."""
    captions = [f"a photo of a {n}." for n in ("red plain circle", "star", "blue star", "heart")]
    captions += ["a photo of a"]
    weight = tiny.weights()["text_model.encoder.layers.0.mlp.fc1.weight"].requires_grad_()
    counts: list[int] = []
    hook = tiny.model.text_model.encoder.layers[0].mlp.fc1.register_forward_hook(
        lambda module, inputs, output: counts.append(output.shape[0] * output.shape[1])
    )
    alone = torch.cat([tiny.encode_text([caption]) for caption in captions])
    apart, together = sum(counts), tiny.encode_text(captions)
    hook.remove()
    torch.testing.assert_close(together, alone)
    padded = tiny.tokenize(captions).numel()
    assert sum(counts) - apart == padded - 5 * len(captions) + 5  # start and four words, once
    direction = torch.randn_like(alone)
    grads = [torch.autograd.grad((f * direction).sum(), weight)[0] for f in (alone, together)]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


def test_the_output_of_the_trunk_gives_the_same_features(tiny) -> None:
    """Images and captions, also with prompts that a method adds."""
    pixels = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    captions = [f"a photo of a {n}." for n in ("red plain circle", "star", "blue star", "heart")]
    images, texts = tiny.encode_image_trunk(pixels), tiny.encode_text_trunk(captions)
    assert torch.equal(tiny.encode_image(images), tiny.encode_image(pixels))
    assert torch.equal(tiny.encode_text(texts), tiny.encode_text(captions))
    hooks = TowerHooks(torch.randn(3, 5, 128))
    assert torch.equal(tiny.encode_image(images, hooks), tiny.encode_image(pixels, hooks))
    pool = PromptPool(tiny, pool_size=4, prompt_length=2, top_k=2)
    layers = {"g_prompt_layers": 1, "e_prompt_layers": 1}
    for wrapped in (pool, PrefixPrompts(tiny, pool_size=2, prompt_length=3, **layers)):
        images = wrapped.encode_image_trunk(pixels)
        assert torch.equal(wrapped.encode_image(images), wrapped.encode_image(pixels))


def test_the_last_block_computes_only_the_token_that_is_read(tiny) -> None:
    shapes: list[tuple[int, ...]] = []
    for tower in (tiny.model.vision_model, tiny.model.text_model):
        tower.encoder.layers[-1].mlp.fc1.register_forward_hook(
            lambda module, inputs, output: shapes.append(tuple(output.shape[:2]))
        )
    tiny.encode_image(torch.rand(3, 3, 32, 32))
    tiny.encode_text([f"a photo of a {n}." for n in ("star", "blue star", "heart", "car", "dog")])
    assert shapes == [(3, 1), (5, 1)]


def test_prompts_are_tokens_beside_the_patches(tiny) -> None:
    pixels = torch.rand(2, 3, 32, 32)
    plain = tiny.encode_image(pixels)
    prompted = tiny.encode_image(pixels, TowerHooks(torch.randn(2, 5, 128)))
    assert prompted.shape == plain.shape
    assert not torch.allclose(prompted, plain)


def test_vit_b_16_has_24_candidates_and_4_089_432_selected_weights() -> None:
    transformers = import_transformers()
    config = transformers.CLIPConfig(
        text_config={"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8},
        vision_config={"hidden_size": 768, "intermediate_size": 3072, "patch_size": 16},
        projection_dim=512,
    )
    with torch.device("meta"):
        model = transformers.CLIPModel(config)
    candidates = {n: w for n, w in model.named_parameters() if n.endswith(".mlp.fc1.weight")}
    processing = {
        **read_preprocessing(find_source("tiny")),
        "size": {"shortest_edge": 224},
        "crop_size": 224,
    }
    backbone = CLIPBackbone(model, None, processing, "ViT-B-16")
    weights = backbone.first_mlp_weights()
    assert set(weights) == set(candidates)
    assert len(weights) == 24
    assert sum(w.numel() for w in weights.values()) == 40_894_464
    assert sum(top_count(0.1, w.numel()) for w in weights.values()) == 4_089_432


def test_unknown_class_names_get_different_features(tiny) -> None:
    features = tiny.encode_text(
        ["a photo of a zebra.", "a photo of a tractor.", "a photo of Ωμέγα."]
    )
    assert (features @ features.T).fill_diagonal_(0).max() < 0.999


def test_the_embedded_model_is_small_and_complete() -> None:
    assert (TINY / "model.safetensors").stat().st_size <= 8 * 2**20
    assert load_backbone("tiny").fingerprint() == load_backbone(str(TINY)).fingerprint()


def test_preprocessing_equals_that_of_transformers(tiny) -> None:
    data = torch.randint(0, 255, (47, 61, 3), generator=torch.Generator().manual_seed(1))
    image = Image.fromarray(data.to(torch.uint8).numpy())
    config = json.loads((TINY / "preprocessor_config.json").read_text())
    processor = import_transformers().CLIPImageProcessorPil(**config)
    expected = processor(images=image, return_tensors="pt")["pixel_values"][0]
    pixels = (to_float(tiny.preprocess(image)) - tiny.image_mean) / tiny.image_std
    torch.testing.assert_close(pixels, expected, atol=1e-5, rtol=1e-5)


def test_grey_and_transparent_images_become_rgb(tiny) -> None:
    for mode in ("L", "RGBA", "P", "1"):
        assert tiny.preprocess(Image.new(mode, (40, 50))).shape == (3, 32, 32)


@pytest.mark.parametrize("name", ["ViT-B/16", "ViT-L-14", "no-such-org/no-such-model"])
def test_a_model_that_does_not_exist_is_one_sentence(name: str) -> None:
    with pytest.raises(InputError, match="could not be loaded") as error:
        load_backbone(name)
    assert "save_pretrained" in str(error.value)


def test_a_folder_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        load_backbone(str(tmp_path))


def test_truncated_weights_are_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "truncated"
    shutil.copytree(TINY, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match="could not be loaded"):
        load_backbone(str(folder))


def test_the_fingerprint_depends_on_weights_activation_and_preprocessing(
    tiny, tmp_path: Path
) -> None:
    first = tiny.fingerprint()
    other = tiny.shared_copy(unshared=list(tiny.weights()))
    with torch.no_grad():
        other.weights()["logit_scale"].add_(1e-6)
    assert other.fingerprint() != first
    folder = tmp_path / "other"
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["hidden_act"] = "gelu"
    (folder / "config.json").write_text(json.dumps(config))
    assert load_backbone(str(folder)).fingerprint() != first
    processing = {**tiny.processing, "resample": 2}
    assert CLIPBackbone(tiny.model, tiny.tokenizer, processing, "x").fingerprint() != first


@pytest.mark.parametrize("kind", ["old", "nested", "bare"])
def test_every_kind_of_processor_file_is_read(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / kind
    shutil.copytree(TINY, folder)
    file = folder / "preprocessor_config.json"
    config = json.loads(file.read_text())
    if kind == "old":  # sizes as plain numbers, as OpenAI's models have them
        file.write_text(json.dumps(config | {"size": 32, "crop_size": 32}))
    elif kind == "bare":  # no mean and std: CLIP's
        file.write_text(json.dumps({"size": {"shortest_edge": 32}}))
    else:
        file.unlink()
        nested = {"image_processor": config, "processor_class": "CLIPProcessor"}
        (folder / "processor_config.json").write_text(json.dumps(nested))
    backbone = load_backbone(str(folder))
    assert backbone.fingerprint() == load_backbone("tiny").fingerprint()
    assert backbone.preprocess(Image.new("RGB", (50, 40))).shape == (3, 32, 32)


def test_a_misspelt_backbone_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'ViT-B-16'"):
        load_backbone("ViT-B-17")


@shared_only
def test_a_real_backbone_loads_like_any_folder() -> None:
    backbone = load_backbone(str(SHARED / "backbones" / "lit-s14"))
    assert backbone.image_size == 84
    assert backbone.encode_image(torch.rand(2, 3, 84, 84)).shape == (2, 256)
    assert len(backbone.first_mlp_weights()) == 12 + 4  # blocks of both towers


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    """They could execute code; before, the folder was loaded."""
    folder = tmp_path / "pickled"
    shutil.copytree(TINY, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"no weights as safetensors.*NAME@REVISION"):
        load_backbone(str(folder))


def test_a_revision_of_the_hub_can_be_pinned(loaded_tiny, monkeypatch) -> None:
    """Model, tokenizer and preprocessing are all asked for at that revision.

    The library imports its parts when a model is first loaded, as the fixture does.
    """
    transformers, asked = import_transformers(), []

    def load(kind: str, real: object):
        def from_pretrained(where: str, **options: object) -> object:
            asked.append((kind, where, options["revision"], options.get("use_safetensors")))
            return real.from_pretrained(TINY)

        return SimpleNamespace(from_pretrained=from_pretrained)

    def find_file(where: str, name: str, revision: str) -> str:
        asked.append(("file", where, revision, None))
        return str(TINY / name)

    for kind in ("CLIPModel", "AutoTokenizer"):
        monkeypatch.setattr(transformers, kind, load(kind, getattr(transformers, kind)))
    monkeypatch.setattr(transformers.utils, "cached_file", find_file)
    load_backbone("ViT-B-16@refs/pr/3")
    hub_id = "openai/clip-vit-base-patch16"
    assert set(asked) == {
        ("CLIPModel", hub_id, "refs/pr/3", True),
        ("AutoTokenizer", hub_id, "refs/pr/3", None),
        ("file", hub_id, "refs/pr/3", None),
    }
    assert load_backbone("x/y@abc").name == "x/y@abc"
