"""The adapter over transformers, held to the library's own answers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from dosapp.backbones.base import TowerHooks
from dosapp.backbones.clip import CLIPBackbone, import_transformers
from dosapp.backbones.registry import TINY, load_backbone
from dosapp.errors import InputError
from dosapp.functional.masks import top_count
from dosapp.methods.dualprompt import PrefixPrompts
from dosapp.methods.l2p import PromptPool
from support.settings import SHARED, shared_only


def test_walking_the_blocks_gives_the_librarys_features(tiny) -> None:
    pixels = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    mean, std = (
        torch.tensor(tiny.processing[k]).view(3, 1, 1) for k in ("image_mean", "image_std")
    )
    captions = ["a photo of a red plain circle.", "a star.", "one blue striped square in a photo."]
    words = tiny.tokenizer(captions, padding="max_length", max_length=32, return_tensors="pt")
    with torch.no_grad():
        theirs = tiny.model(
            input_ids=words["input_ids"],
            attention_mask=words["attention_mask"],
            pixel_values=(pixels - mean) / std,
        )
        torch.testing.assert_close(tiny.encode_image(pixels), theirs.image_embeds)
        torch.testing.assert_close(tiny.encode_text(captions), theirs.text_embeds)


def test_text_is_cut_to_the_longest_caption(tiny) -> None:
    short, long = "a star.", "one blue striped square in a photo, quite far away."
    alone = tiny.encode_text([short])
    torch.testing.assert_close(tiny.encode_text([short, long])[0], alone[0])
    assert tiny.tokenize([short]).shape[1] < tiny.tokenize([long]).shape[1] <= 32


def test_a_common_beginning_is_read_once_and_changes_nothing(tiny) -> None:
    """Features and gradients, with captions of other lengths and one that is all beginning."""
    captions = [f"a photo of a {n}." for n in ("red plain circle", "star", "blue star", "heart")]
    captions += ["a photo of a"]
    name = "text_model.encoder.layers.0.mlp.fc1.weight"
    weight = tiny.weights()[name].requires_grad_()
    seen: list[int] = []
    hook = tiny.model.text_model.encoder.layers[0].mlp.fc1.register_forward_hook(
        lambda module, given, made: seen.append(made.shape[0] * made.shape[1])
    )
    alone = torch.cat([tiny.encode_text([caption]) for caption in captions])
    apart, together = sum(seen), tiny.encode_text(captions)
    hook.remove()
    torch.testing.assert_close(together, alone)
    room = tiny.tokenize(captions).numel()
    assert sum(seen) - apart == room - 5 * len(captions) + 5  # start and four words, once
    direction = torch.randn_like(alone)
    grads = [torch.autograd.grad((f * direction).sum(), weight)[0] for f in (alone, together)]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


def test_what_has_begun_ends_with_the_same_features(tiny) -> None:
    """Pictures and captions through the trunk, also where a method adds something on the way."""
    pixels = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    captions = [f"a photo of a {n}." for n in ("red plain circle", "star", "blue star", "heart")]
    begun, words = tiny.encode_image_trunk(pixels), tiny.encode_text_trunk(captions)
    assert torch.equal(tiny.encode_image(begun), tiny.encode_image(pixels))
    assert torch.equal(tiny.encode_text(words), tiny.encode_text(captions))
    more = TowerHooks(torch.randn(3, 5, 128))
    assert torch.equal(tiny.encode_image(begun, more), tiny.encode_image(pixels, more))
    pool = PromptPool(tiny, pool_size=4, prompt_length=2, top_k=2)
    layers = {"g_prompt_layers": 1, "e_prompt_layers": 1}
    for wrapped in (pool, PrefixPrompts(tiny, pool_size=2, prompt_length=3, **layers)):
        begun = wrapped.encode_image_trunk(pixels)
        assert torch.equal(wrapped.encode_image(begun), wrapped.encode_image(pixels))


def test_only_what_is_read_thinks_in_the_last_block(tiny) -> None:
    seen: list[tuple[int, ...]] = []
    for tower in (tiny.model.vision_model, tiny.model.text_model):
        tower.encoder.layers[-1].mlp.fc1.register_forward_hook(
            lambda module, given, made: seen.append(tuple(made.shape[:2]))
        )
    tiny.encode_image(torch.rand(3, 3, 32, 32))
    tiny.encode_text([f"a photo of a {n}." for n in ("star", "blue star", "heart", "car", "dog")])
    assert seen == [(3, 1), (5, 1)]


def test_prompts_join_the_patches(tiny) -> None:
    pixels = torch.rand(2, 3, 32, 32)
    plain = tiny.encode_image(pixels)
    prompted = tiny.encode_image(pixels, TowerHooks(torch.randn(2, 5, 128)))
    assert prompted.shape == plain.shape
    assert not torch.allclose(prompted, plain)


def test_vit_b_16_has_24_candidates_and_4_089_432_selected_weights() -> None:
    library = import_transformers()
    config = library.CLIPConfig(
        text_config={"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8},
        vision_config={"hidden_size": 768, "intermediate_size": 3072, "patch_size": 16},
        projection_dim=512,
    )
    with torch.device("meta"):
        model = library.CLIPModel(config)
    candidates = {n: w for n, w in model.named_parameters() if n.endswith(".mlp.fc1.weight")}
    net = CLIPBackbone.__new__(CLIPBackbone)
    net.model = model
    assert set(net.first_mlp_weights()) == set(candidates)
    assert len(net.first_mlp_weights()) == 24
    assert sum(w.numel() for w in net.first_mlp_weights().values()) == 40_894_464
    assert sum(top_count(0.1, w.numel()) for w in net.first_mlp_weights().values()) == 4_089_432


def test_names_never_seen_still_get_different_features(tiny) -> None:
    features = tiny.encode_text(
        ["a photo of a zebra.", "a photo of a tractor.", "a photo of Ωμέγα."]
    )
    assert (features @ features.T).fill_diagonal_(0).max() < 0.999


def test_the_embedded_model_is_small_and_complete() -> None:
    assert (TINY / "model.safetensors").stat().st_size <= 8 * 2**20
    assert load_backbone("tiny").fingerprint() == load_backbone(str(TINY)).fingerprint()


def test_pictures_are_prepared_like_the_librarys_processor(tiny) -> None:
    data = torch.randint(0, 255, (47, 61, 3), generator=torch.Generator().manual_seed(1))
    image = Image.fromarray(data.to(torch.uint8).numpy())
    written = json.loads((TINY / "preprocessor_config.json").read_text())
    processor = import_transformers().CLIPImageProcessorPil(**written)
    theirs = processor(images=image, return_tensors="pt")["pixel_values"][0]
    mean, std = (
        torch.tensor(tiny.processing[k]).view(3, 1, 1) for k in ("image_mean", "image_std")
    )
    ours = (tiny.preprocess(image).float() / 255 - mean) / std
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_grey_and_transparent_pictures_become_rgb(tiny) -> None:
    for mode in ("L", "RGBA", "P", "1"):
        assert tiny.preprocess(Image.new(mode, (40, 50))).shape == (3, 32, 32)


@pytest.mark.parametrize("name", ["ViT-B/16", "ViT-L-14", "no-such-org/no-such-model"])
def test_a_model_that_is_not_there_is_one_sentence(name: str) -> None:
    with pytest.raises(InputError, match="could not be loaded") as error:
        load_backbone(name)
    assert "save_pretrained" in str(error.value)


def test_a_folder_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        load_backbone(str(tmp_path))


def test_torn_weights_are_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "torn"
    shutil.copytree(TINY, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match="could not be loaded"):
        load_backbone(str(folder))


def test_the_fingerprint_sees_weights_activation_and_preprocessing(tiny, tmp_path: Path) -> None:
    first = tiny.fingerprint()
    other = tiny.shared_copy(own=list(tiny.weights()))
    with torch.no_grad():
        other.weights()["logit_scale"].add_(1e-6)
    assert other.fingerprint() != first
    folder = tmp_path / "other"
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["hidden_act"] = "gelu"
    (folder / "config.json").write_text(json.dumps(config))
    assert load_backbone(str(folder)).fingerprint() != first


@pytest.mark.parametrize("kind", ["old", "nested", "bare"])
def test_every_kind_of_processor_file_is_read(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / kind
    shutil.copytree(TINY, folder)
    file = folder / "preprocessor_config.json"
    written = json.loads(file.read_text())
    if kind == "old":  # sizes as plain numbers, as OpenAI's models have them
        file.write_text(json.dumps(written | {"size": 32, "crop_size": 32}))
    elif kind == "bare":  # no mean and std: CLIP's
        file.write_text(json.dumps({"size": {"shortest_edge": 32}}))
    else:
        file.unlink()
        nested = {"image_processor": written, "processor_class": "CLIPProcessor"}
        (folder / "processor_config.json").write_text(json.dumps(nested))
    net = load_backbone(str(folder))
    assert net.fingerprint() == load_backbone("tiny").fingerprint()
    assert net.preprocess(Image.new("RGB", (50, 40))).shape == (3, 32, 32)


def test_a_misspelt_backbone_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'ViT-B-16'"):
        load_backbone("ViT-B-17")


@shared_only
def test_real_small_loads_like_any_folder() -> None:
    net = load_backbone(str(SHARED / "backbones" / "real-small"))
    assert net.image_size == 64
    assert net.encode_image(torch.rand(2, 3, 64, 64)).shape[0] == 2
    assert len(net.first_mlp_weights()) == 9
