"""A learner as a plain model gives the same answers without us."""

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
def taught(small, tiny):
    stream = build_scenario(small(), tiny.preprocess)
    learner = Learner(small().learner(), tiny)
    learner.learn(stream.session(0))
    for pixels in stream.session(0).unlabelled.batches(8):
        learner.adapt(pixels)
    pixels = stream.tasks[0].test.read(range(5))
    expert = next(iter(learner.method.experts(learner.student).values()))
    return learner, pixels, learner.logits(pixels, expert)


def test_transformers_alone_gives_the_same_logits(taught, tmp_path) -> None:
    """Its own model, processor and tokenizer, and its own arithmetic: equal but for rounding."""
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

    learner, pixels, wanted = taught
    export(learner, tmp_path / "x")
    plain = CLIPModel.from_pretrained(tmp_path / "x").eval()
    processor = CLIPImageProcessor.from_pretrained(tmp_path / "x")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "x")
    classes = json.loads((tmp_path / "x" / "classes.json").read_text())
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (processor.image_mean, processor.image_std))
    words = [t.format(name) for name in classes["classes"] for t in classes["templates"][name]]
    assert len(words) == len(learner.classes)  # one template, so no mean of several is in the way
    with torch.no_grad():
        texts = tokenizer(words, padding=True, return_tensors="pt")
        said = plain(pixel_values=(pixels - mean) / std, **texts)
    cosines = said.logits_per_image / classes["scale"]
    torch.testing.assert_close(cosines, wanted, atol=1e-5, rtol=0)


def test_our_own_loader_gives_identical_logits(taught, tmp_path) -> None:
    from transformers import CLIPImageProcessor, CLIPModel

    from dosapp.backbones.registry import load_backbone

    learner, pixels, wanted = taught
    export(learner, tmp_path / "x")
    net = load_backbone(str(tmp_path / "x"))
    classes = json.loads((tmp_path / "x" / "classes.json").read_text())
    texts = load_file(tmp_path / "x" / "classes.safetensors")["features"]
    assert classes["classes"] == learner.classes
    with torch.no_grad():
        assert torch.equal(net.encode_image(pixels) @ texts.T, wanted)
    processor = CLIPImageProcessor.from_pretrained(tmp_path / "x")
    seen = processor(Image.new("RGB", (60, 45)), return_tensors="pt")["pixel_values"]
    assert tuple(seen.shape) == (1, 3, 32, 32)
    plain = CLIPModel.from_pretrained(tmp_path / "x")
    assert all(
        torch.equal(a, b)
        for a, b in zip(plain.state_dict().values(), net.model.state_dict().values(), strict=True)
    )


def test_onnx_gives_the_same_features_for_any_batch(taught, tmp_path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    learner, pixels, wanted = taught
    export(learner, tmp_path / "x", "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "x" / "image.onnx")
    texts = load_file(tmp_path / "x" / "classes.safetensors")["features"].numpy()
    for count in (1, 5):
        [features] = session.run(None, {"pixels": pixels[:count].numpy()})
        np.testing.assert_allclose(features @ texts.T, wanted[:count].numpy(), atol=1e-5)


def test_what_cannot_be_exported_says_so(taught, small, tiny, tmp_path) -> None:
    learner, _, _ = taught
    with pytest.raises(InputError, match="unknown kind of export 'tflite'"):
        export(learner, tmp_path / "x", "tflite")
    with pytest.raises(InputError, match="knows no classes yet"):
        export(Learner(small().learner()), tmp_path / "x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="is not empty"):
        export(learner, tmp_path / "full")
    other = tiny.shared_copy(own=list(tiny.weights()))
    both = Learner(small(method="spu", adapt="rmt").learner(), other)
    both.learn(build_scenario(small(), tiny.preprocess).session(0))
    with pytest.raises(InputError, match="more than one plain CLIP"):
        export(both, tmp_path / "y")
    assert not (tmp_path / "y").exists()
