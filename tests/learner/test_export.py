"""An exported learner gives the same logits without dosapp."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from dosapp.errors import InputError
from dosapp.experiments.plan import build_scenario
from dosapp.learner.export import export
from dosapp.learner.learner import Learner


@pytest.fixture
def adapted(trained):
    """A learner after a session and its stream, images, and their logits."""
    learner, scenario = trained
    for pixels in scenario.session(0).unlabelled.batches(8):
        learner.adapt(pixels)
    pixels = scenario.tasks[0].test.read(range(5))
    _, expert = learner.answering_expert
    return learner, pixels, learner.score_images(pixels, expert)


def test_transformers_alone_gives_the_same_logits(adapted, tmp_path) -> None:
    """Its own model, processor and tokenizer, and its own arithmetic: equal up to rounding."""
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

    learner, pixels, expected = adapted
    export(learner, tmp_path / "x")
    model = CLIPModel.from_pretrained(tmp_path / "x").eval()
    processor = CLIPImageProcessor.from_pretrained(tmp_path / "x")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "x")
    classes = json.loads((tmp_path / "x" / "classes.json").read_text())
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (processor.image_mean, processor.image_std))
    captions = [t.format(name) for name in classes["classes"] for t in classes["templates"][name]]
    assert len(captions) == len(learner.classes)  # one template, so no mean over several
    with torch.no_grad():
        tokens = tokenizer(captions, padding=True, return_tensors="pt")
        output = model(pixel_values=(pixels - mean) / std, **tokens)
    cosines = output.logits_per_image / classes["scale"]
    torch.testing.assert_close(cosines, expected, atol=1e-5, rtol=0)


def test_load_backbone_gives_identical_logits(adapted, tmp_path) -> None:
    from transformers import CLIPImageProcessor, CLIPModel

    from dosapp.backbones.registry import load_backbone

    learner, pixels, expected = adapted
    export(learner, tmp_path / "x")
    backbone = load_backbone(str(tmp_path / "x"))
    classes = json.loads((tmp_path / "x" / "classes.json").read_text())
    texts = load_file(tmp_path / "x" / "classes.safetensors")["features"]
    assert classes["classes"] == learner.classes
    with torch.no_grad():
        assert torch.equal(backbone.encode_image(pixels) @ texts.T, expected)
    processor = CLIPImageProcessor.from_pretrained(tmp_path / "x")
    processed = processor(Image.new("RGB", (60, 45)), return_tensors="pt")["pixel_values"]
    assert tuple(processed.shape) == (1, 3, 32, 32)
    weights = CLIPModel.from_pretrained(tmp_path / "x").state_dict().values()
    own_weights = backbone.model.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(weights, own_weights, strict=True))


def test_onnx_gives_the_same_features_for_any_batch(adapted, tmp_path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    learner, pixels, expected = adapted
    export(learner, tmp_path / "x", "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "x" / "image.onnx")
    texts = load_file(tmp_path / "x" / "classes.safetensors")["features"].numpy()
    for count in (1, 5):
        [features] = session.run(None, {"pixels": pixels[:count].numpy()})
        np.testing.assert_allclose(features @ texts.T, expected[:count].numpy(), atol=1e-5)


def test_what_cannot_be_exported_is_an_input_error(adapted, small, tiny, tmp_path) -> None:
    learner, _, _ = adapted
    with pytest.raises(InputError, match="unknown kind of export 'tflite'"):
        export(learner, tmp_path / "x", "tflite")
    with pytest.raises(InputError, match="knows no classes yet"):
        export(Learner(small().learner()), tmp_path / "x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="is not empty"):
        export(learner, tmp_path / "full")
    own = tiny.shared_copy(unshared=list(tiny.weights()))
    ensemble = Learner(small(method="spu", adapt="rmt").learner(), own)
    ensemble.learn(build_scenario(small(), tiny.preprocess).session(0))
    with pytest.raises(InputError, match="more than one CLIP model"):
        export(ensemble, tmp_path / "y")
    assert not (tmp_path / "y").exists()
