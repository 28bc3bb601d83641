"""Every family of dual encoders: the library's own features, gradients, learning, files."""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image

from dosapp.backbones.base import TowerHooks
from dosapp.backbones.checkpoint import import_transformers
from dosapp.backbones.dual_encoder import DualEncoder
from dosapp.backbones.registry import FAMILIES as REGISTERED
from dosapp.backbones.registry import load_backbone
from dosapp.data.base import Prompts
from dosapp.data.preprocess import to_float
from dosapp.errors import InputError
from dosapp.learner.export import export
from dosapp.learner.learner import Learner
from dosapp.scenario import Session
from dosapp.settings import LearnerSettings
from support.families import FAMILIES, PROCESSING, SIZE, VISION, build, text_config

ALL_PARTS = ("clip", "siglip", "siglip2", "deit+roberta", "dinov2+bert")  # each tower once

CAPTIONS = ["a photo of a red plain circle.", "a star.", "one blue striped square in a photo."]


@pytest.fixture(params=list(FAMILIES))
def family(request, loaded_tiny) -> DualEncoder:
    return build(request.param, loaded_tiny.tokenizer)


def images(count: int = 3) -> torch.Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def library_features(backbone: DualEncoder) -> tuple[torch.Tensor, torch.Tensor]:
    """Image and text features of the library's own forward pass."""
    pixels = (images() - backbone.image_mean) / backbone.image_std
    is_siglip = backbone.model_class.startswith("Siglip")
    tokens = backbone.tokenizer(
        CAPTIONS,
        padding="max_length" if is_siglip else True,
        truncation=True,
        max_length=40,
        return_tensors="pt",
    )
    inputs = {"input_ids": tokens["input_ids"], "pixel_values": pixels}
    if not is_siglip:
        inputs["attention_mask"] = tokens["attention_mask"]
    if backbone.model_class == "Siglip2Model":
        from transformers.models.siglip2.image_processing_pil_siglip2 import (
            convert_image_to_patches,
        )

        patches = [torch.from_numpy(convert_image_to_patches(x.numpy(), 16)) for x in pixels]
        inputs["pixel_values"] = torch.stack(patches)
        inputs["pixel_attention_mask"] = torch.ones(3, 4)
        inputs["spatial_shapes"] = torch.tensor([[2, 2]] * 3)
    with torch.no_grad():
        output = backbone.model(**inputs)
    return output.image_embeds, output.text_embeds


def test_features_equal_those_of_the_library(family) -> None:
    expected_images, expected_texts = library_features(family)
    with torch.no_grad():
        torch.testing.assert_close(
            family.encode_image(images()), expected_images, atol=2e-6, rtol=1e-4
        )
        torch.testing.assert_close(
            family.encode_text(CAPTIONS), expected_texts, atol=2e-6, rtol=1e-4
        )


def test_a_caption_has_the_same_features_alone_and_among_others(family) -> None:
    many = [*CAPTIONS, *(f"a photo of a {n}." for n in ("star", "blue star", "heart", "car"))]
    alone = torch.cat([family.encode_text([caption]) for caption in many])
    torch.testing.assert_close(family.encode_text(many), alone, atol=2e-6, rtol=1e-4)


def test_the_trunk_is_shared_exactly(family) -> None:
    trunk = family.encode_image_trunk(images())
    assert torch.equal(family.encode_image(trunk), family.encode_image(images()))
    assert torch.equal(family.encode_image(trunk[1:]), family.encode_image(images())[1:])
    texts = family.encode_text_trunk(CAPTIONS)
    assert torch.equal(family.encode_text(texts), family.encode_text(CAPTIONS))


def test_gradients_reach_every_weight_that_may_train(family) -> None:
    """All but positions and words that did not occur; among them the first MLP layers."""
    for weight in family.weights().values():
        weight.requires_grad_(True)
    features = family.encode_image(images()) @ family.encode_text(CAPTIONS).T
    (family.logit_scale * features).log_softmax(dim=1).diagonal().sum().backward()
    pretrained = family.own_weights()
    missing = {n for n, w in pretrained.items() if w.grad is None or not w.grad.any()}
    assert not missing
    unused = family.weights().keys() - pretrained.keys()
    assert all(family.weights()[name].grad is None for name in unused)
    layers = 2 * (2 if "swiglu" in family.name else 1) + 2
    assert len(family.first_mlp_weights()) == layers
    trunk = family.trunk_weights()
    assert trunk
    assert not trunk.keys() & family.first_mlp_weights().keys()


def test_prompts_and_prefixes_of_methods_enter_every_image_tower(family) -> None:
    plain = family.encode_image(images())
    prompts = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1))
    for hooks in (TowerHooks(prompts), TowerHooks(prefixes={1: torch.stack([prompts, prompts])})):
        changed = family.encode_image(images(), hooks)
        assert changed.shape == plain.shape
        assert not torch.allclose(changed, plain)


def test_precision_copies_and_files(family, tmp_path) -> None:
    """bfloat16 is close, a copy has weights of its own, a folder gives the same backbone."""
    exact = family.encode_image(images())
    family.configure(LearnerSettings(precision="bfloat16"))
    assert (family.encode_image(images()) * exact).sum(dim=1).min() > 0.99
    family.configure(LearnerSettings())
    name = next(iter(family.first_mlp_weights()))
    copy = family.shared_copy([name])
    with torch.no_grad():
        copy.weights()[name].add_(0.5)
    assert torch.equal(family.encode_image(images()), exact)
    assert copy.fingerprint() != family.fingerprint()
    changed = torch.cat([copy.encode_image(images()), copy.encode_text(CAPTIONS)])
    assert not torch.equal(changed, torch.cat([exact, family.encode_text(CAPTIONS)]))
    family.save(tmp_path / "model")
    loaded = load_backbone(f"local-dir:{tmp_path / 'model'}")
    assert type(loaded) is type(family)
    assert loaded.fingerprint() == family.fingerprint()
    assert torch.equal(loaded.encode_image(images()), exact)
    assert loaded.preprocess(Image.new("RGB", (50, 40))).shape == (3, 32, 32)


def session(seed: int) -> Session:
    """Four classes of random colours with a little noise, which any model can learn."""
    generator = torch.Generator().manual_seed(seed)
    colours = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220)}
    colours["white"] = (240, 240, 240)
    return Session.from_images(
        {
            name: (
                torch.tensor(colour).view(1, 3, 1, 1)
                + torch.randint(-30, 15, (8, 3, 32, 32), generator=generator)
            )
            .clamp(0, 255)
            .to(torch.uint8)
            for name, colour in colours.items()
        }
    )


@pytest.mark.parametrize("method", ["dosapp", "spu", "flyp", "l2p", "dualprompt"])
@pytest.mark.parametrize("name", ALL_PARTS)
def test_methods_learn_on_every_family(name, method, loaded_tiny) -> None:
    backbone = build(name, loaded_tiny.tokenizer)
    # These towers have two blocks: one for prompts of each kind.
    layers = {"g_prompt_layers": 1, "e_prompt_layers": 1} if method == "dualprompt" else {}
    settings = LearnerSettings(
        method=method, epochs=12, batch_size=16, lr=5e-3, backbone=name, options=layers
    )
    learner, train = Learner(settings, backbone), session(0)
    learner.student.text_head.add_classes(train.classes, Prompts())
    pixels = train.train.read(range(len(train.train)))
    labels = torch.from_numpy(train.train.labels)

    def loss() -> float:
        with torch.no_grad():
            return float(learner.student.clip_loss(to_float(pixels), labels))

    before = loss()
    prompts = [n for n in learner.student.backbone.weights() if n.startswith(f"{method}.")]
    initial = [learner.student.backbone.weights()[n].detach().clone() for n in prompts]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about small sessions
        learner.learn(train)
    if prompts:  # they cannot teach a frozen tower of random weights, but they train
        trained = [learner.student.backbone.weights()[n] for n in prompts]
        assert not any(torch.equal(a, b) for a, b in zip(initial, trained, strict=True))
    else:
        assert loss() < before - 0.1
    assert len(learner.predict(pixels)) == len(pixels)
    learner.adapt(pixels)


@pytest.mark.parametrize("name", ALL_PARTS)
def test_a_learner_is_saved_loaded_and_exported(name, loaded_tiny, tmp_path) -> None:
    folder = tmp_path / "model"
    build(name, loaded_tiny.tokenizer).save(folder)
    settings = LearnerSettings(method="spu", epochs=1, batch_size=16, backbone=str(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learner = Learner(settings)
        learner.learn(session(0))
    pixels = session(1).train.read(range(6))
    learner.save(tmp_path / "learner")
    assert Learner.load(tmp_path / "learner").predict(pixels) == learner.predict(pixels)
    export(learner, tmp_path / "pretrained")
    exported, student = load_backbone(str(tmp_path / "pretrained")), learner.student.backbone
    torch.testing.assert_close(exported.encode_image(images()), student.encode_image(images()))
    if name in ("siglip", "dinov2+bert"):  # attention pooling, and LayerScale
        onnxruntime = pytest.importorskip("onnxruntime")
        export(learner, tmp_path / "onnx", "onnx")
        runtime = onnxruntime.InferenceSession(tmp_path / "onnx" / "image.onnx")
        [features] = runtime.run(None, {"pixels": images().numpy()})
        expected = student.encode_image(images()).detach()
        torch.testing.assert_close(torch.from_numpy(features), expected, atol=1e-5, rtol=1e-4)


def test_a_siglip_caption_is_padded_to_the_full_length_on_the_tokenizers_side(loaded_tiny) -> None:
    backbone = build("siglip", loaded_tiny.tokenizer)
    ids = backbone.tokenize(["a star.", "a blue star."])
    assert ids.shape == (2, 40)
    assert ids[0, -1] == loaded_tiny.tokenizer.pad_token_id


def test_preprocessing_that_cannot_be_right_is_said(loaded_tiny, tmp_path) -> None:
    folder = tmp_path / "model"
    build("vit+bert", loaded_tiny.tokenizer).save(folder)
    file = folder / "preprocessor_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"crop_size": 24}))
    with pytest.warns(UserWarning, match="crops to 24 px, but the model takes 32 px"):
        load_backbone(str(folder))
    file.write_text(json.dumps(config | {"size": {"shortest_edge": 20}}))
    with pytest.warns(UserWarning, match="a black border is added"):
        load_backbone(str(folder))
    file.write_text(json.dumps({"image_processor_type": "ViTImageProcessor", "size": 32}))
    with pytest.raises(InputError, match="has no image_mean"):
        load_backbone(str(folder))
    file.unlink()
    with pytest.raises(InputError, match="could not be loaded"):
        load_backbone(str(folder))


def test_dinov2_takes_the_size_that_its_preprocessing_crops_to(loaded_tiny, tmp_path) -> None:
    folder = tmp_path / "model"
    build("dinov2+bert", loaded_tiny.tokenizer).save(folder)
    file = folder / "preprocessor_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"size": {"shortest_edge": 56}, "crop_size": 48}))
    backbone = load_backbone(str(folder))
    assert backbone.image_size == 48
    pixels = torch.rand(2, 3, 48, 48)
    normalised = (pixels - backbone.image_mean) / backbone.image_std
    with torch.no_grad():
        output = backbone.model.get_image_features(pixel_values=normalised).pooler_output
        expected = torch.nn.functional.normalize(output, dim=-1)
        torch.testing.assert_close(backbone.encode_image(pixels), expected, atol=2e-6, rtol=1e-4)


def test_a_model_that_is_no_dual_encoder_is_one_sentence(loaded_tiny, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(InputError, match="'llama', not a dual encoder we know"):
        load_backbone(str(tmp_path))


def test_the_documented_family_works(loaded_tiny, tmp_path, monkeypatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "backbones.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.setattr("dosapp.backbones.registry.FAMILIES", dict(REGISTERED))
    names: dict[str, type[DualEncoder]] = {}
    exec(example, names)
    library, tokenizer = import_transformers(), loaded_tiny.tokenizer
    config = library.ChineseCLIPConfig(
        text_config=text_config(tokenizer), vision_config=VISION, projection_dim=24
    )
    model = library.ChineseCLIPModel(config)
    names["ChineseCLIPBackbone"](model, tokenizer, PROCESSING, "x").save(tmp_path / "model")
    backbone = load_backbone(str(tmp_path / "model"))
    expected_images, expected_texts = library_features(backbone)
    close = {"atol": 2e-6, "rtol": 1e-4}
    with torch.no_grad():
        torch.testing.assert_close(backbone.encode_image(images()), expected_images, **close)
        torch.testing.assert_close(backbone.encode_text(CAPTIONS), expected_texts, **close)
    assert len(backbone.first_mlp_weights()) == 2 * SIZE["num_hidden_layers"]
