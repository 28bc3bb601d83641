"""LoRA, TDA and OGA, checked by hand."""

import math

import numpy as np
import pytest
import torch

from dosapp.errors import InputError
from dosapp.experiments.plan import build_scenario
from dosapp.learner.export import export
from dosapp.learner.learner import Learner
from dosapp.methods.lora import LowRankBackbone
from dosapp.methods.registry import build_method


@pytest.fixture
def train_session(small, tiny):
    """A learner after a session, before its stream; and the scenario."""

    def make(**changes: object):
        settings = small(**changes)
        learner = Learner(settings.learner(), tiny)
        scenario = build_scenario(settings, tiny.preprocess)
        learner.learn(scenario.session(0))
        return learner, scenario

    return make


class TestLoRA:
    def test_starts_as_the_pretrained_model(self, tiny) -> None:
        pixels = torch.rand(2, 3, 32, 32)
        lora = LowRankBackbone(tiny, ("q_proj", "v_proj"), 4, 8.0, 0)
        assert torch.equal(lora.encode_image(pixels), tiny.encode_image(pixels))
        assert set(lora.own_weights()) == set(tiny.weights())
        assert all(4 in weight.shape for weight in lora.low_rank_weights().values())

    def test_a_layer_is_w_plus_alpha_over_r_b_a(self, tiny) -> None:
        lora = LowRankBackbone(tiny, ("fc1",), 2, 6.0, 0)
        name = "vision_model.encoder.layers.0.mlp.fc1"
        layer = lora.inner.model.get_submodule(name)
        generator = torch.Generator().manual_seed(0)
        layer.lora_B.data = torch.randn(layer.lora_B.shape, generator=generator)
        inputs = torch.randn(3, layer.in_features, generator=generator)
        weight = layer.weight + 3 * layer.lora_B @ layer.lora_A
        torch.testing.assert_close(layer(inputs), inputs @ weight.T + layer.bias)
        merged = lora.merge().model.get_submodule(name)
        torch.testing.assert_close(merged.weight, weight)
        plain = tiny.model.get_submodule(name)
        assert plain.weight is layer.weight  # shared, and no low-rank update in the original
        assert not hasattr(plain, "lora_A")

    def test_only_the_updates_train(self, train_session, tiny) -> None:
        before = {n: w.detach().clone() for n, w in tiny.weights().items()}
        learner, _ = train_session(method="lora")
        weights = learner.student.backbone.weights()
        assert all(torch.equal(weights[n], w) for n, w in before.items())
        assert all(w.any() for n, w in weights.items() if n.endswith("lora_B"))
        stored = [n for n in learner.state().tensors if n.startswith("student/")]
        assert stored
        assert all(".lora_" in name for name in stored)

    def test_recomputed_activations_give_the_same_weights(self, train_session, tiny) -> None:
        plain, _ = train_session(method="lora")
        settings = {"gradient_checkpointing": True, "microbatch": 3}
        other, _ = train_session(method="lora", **settings)
        weights = other.student.backbone.weights()
        for name, weight in plain.student.backbone.weights().items():
            torch.testing.assert_close(weights[name], weight, atol=2e-4, rtol=0)

    def test_is_exported_as_a_plain_model(self, train_session, tmp_path) -> None:
        from dosapp.backbones.registry import load_backbone

        learner, scenario = train_session(method="lora", lr=1e-2)
        pixels = scenario.tasks[0].test.read(range(4))
        export(learner, tmp_path / "x")
        with torch.no_grad():
            features = load_backbone(str(tmp_path / "x")).encode_image(pixels)
            expected = learner.student.backbone.encode_image(pixels)
        torch.testing.assert_close(features, expected, atol=1e-5, rtol=0)

    def test_an_unknown_layer_is_one_sentence(self, learner_settings, tiny) -> None:
        with pytest.raises(InputError, match="no layer is named query"):
            Learner(learner_settings(method="lora", options={"target_modules": ["query"]}), tiny)


class TestTDA:
    def test_scores_are_clips_plus_the_caches(self, train_session) -> None:
        learner, scenario = train_session(method="spu", adapt="tda")
        method, student = learner.method.unlabelled, learner.student
        pixels = scenario.session(0).unlabelled.read(range(10))
        learner.adapt(pixels)
        with torch.no_grad():
            features, texts = student.backbone.encode_image(pixels), student.encode_captions()
            logits = (student.backbone.logit_scale * features @ texts.T).numpy()
        f = features.numpy()
        p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        entropy = -(p * np.log(p)).sum(axis=1)
        label = p.argmax(axis=1)
        expected = logits.astype(np.float64)
        for c in range(3):
            order = sorted((entropy[n], n) for n in range(10) if label[n] == c)
            for _, k in order[:3]:
                expected[:, c] += 2.0 * np.exp(-5.0 * (1 - f @ f[k]))
            unsure = [(e, n) for e, n in order if 0.2 < e / math.log2(3) < 0.5]
            for _, k in unsure[:2]:
                mask = (p[k] > 0.03) & (p[k] < 1.0)
                expected -= 0.117 * np.exp(-1.0 * (1 - f @ f[k]))[:, None] * mask
        scores = learner.answering_expert[1].head.score(features, texts)
        assert np.allclose(scores, expected, atol=1e-3)
        assert len(method.positive) <= 9

    def test_unsure_images_fill_the_negative_cache(self) -> None:
        method = build_method("spu", "tda").unlabelled
        method.make_head()
        logits = torch.tensor([[9.0, 0.0, 0.0], [1.0, 0.0, -4.0], [0.0, 0.0, 0.0]])
        method.store(torch.eye(3), logits)  # sure, unsure, uniform: 1.1 / log2 3 = 0.69
        assert method.negative.features.tolist() == [[0.0, 1.0, 0.0]]
        assert method.negative.values.tolist() == [[True, True, False]]

    def test_training_clears_the_caches_and_a_frozen_model_keeps_them(self, train_session) -> None:
        for labelled, is_kept in (("zero-shot", True), ("spu", False)):
            learner, scenario = train_session(method=labelled, adapt="tda")
            result = learner.adapt(scenario.session(0).unlabelled.read(range(8)))
            assert result.stepped  # so that a service publishes the caches
            learner.learn(scenario.session(1))
            assert bool(len(learner.method.unlabelled.positive)) == is_kept

    def test_no_weight_changes_on_the_stream(self, train_session) -> None:
        learner, scenario = train_session(method="spu", adapt="tda")
        before = {n: w.detach().clone() for n, w in learner.student.backbone.weights().items()}
        learner.adapt(scenario.session(0).unlabelled.read(range(8)))
        after = learner.student.backbone.weights()
        assert all(torch.equal(after[n], w) for n, w in before.items())


class TestOGA:
    def test_scores_are_log_of_captions_times_gaussians(self, train_session) -> None:
        learner, scenario = train_session(
            method="zero-shot", adapt="oga", options={"shot_capacity": 2, "tau": 0.3}
        )
        student, session = learner.student, scenario.session(0)
        pixels = session.unlabelled.read(range(10))
        learner.adapt(pixels)
        with torch.no_grad():
            f = student.backbone.encode_image(pixels)
            texts = student.encode_captions()
            train = student.backbone.encode_image(session.train.read(range(len(session.train))))
            scale = student.backbone.logit_scale
            p = (scale * f @ texts.T).softmax(dim=1).double().numpy()
        entropy, label = -(p * np.log(p)).sum(axis=1), p.argmax(axis=1)
        features, means = f.double().numpy(), []
        scatter, count = np.zeros((96, 96)), 0
        for c in range(3):
            best = sorted((entropy[n], n) for n in range(10) if label[n] == c)[:2]
            rows = train.double().numpy()[session.train.labels == c]
            rows = np.concatenate([rows, features[[n for _, n in best]]])
            means.append(rows.mean(axis=0))
            scatter += (rows - means[-1]).T @ (rows - means[-1])
            count += len(rows)
        inverse = (count - 1) * np.linalg.inv(
            scatter + np.trace(scatter) / (count - 1) * np.eye(96)
        )
        gap = features[:, None] - np.stack(means)  # [B, C, D]
        log_density = -0.5 * np.einsum("bcd,de,bce->bc", gap, inverse, gap)
        expected = p * np.exp(0.3 * (log_density - log_density.max(axis=1, keepdims=True)))
        expected /= expected.sum(axis=1, keepdims=True)
        scores = learner.answering_expert[1].head.score(f, texts).softmax(dim=1)
        assert np.allclose(scores, expected, atol=1e-3)

    def test_a_head_of_the_learner_scores_the_same_features(self, train_session) -> None:
        learner, scenario = train_session(method="zero-shot", adapt="oga", head="ncm")
        learner.adapt(scenario.session(0).unlabelled.read(range(8)))
        assert list(learner.experts()) == ["ncm", "oga", "student"]
        scale = learner.answering_expert[1].head.scale
        assert scale == learner.student.backbone.logit_scale


@pytest.mark.parametrize("adapter", ["tda", "oga"])
def test_caches_follow_removed_classes_and_are_exported(adapter, train_session, tmp_path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    learner, scenario = train_session(method="zero-shot", adapt=adapter)
    learner.adapt(scenario.session(0).unlabelled.read(range(8)))
    learner.remove(learner.classes[0])
    learner.rename(learner.classes[0], "newcomer")
    pixels = scenario.tasks[0].test.read(range(3))
    published = learner.at(learner.state(), trainable=False)  # as in a service
    assert published.predict(pixels) == learner.predict(pixels)
    export(learner, tmp_path / "x", "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "x" / "image.onnx")
    [logits] = session.run(["logits"], {"pixels": pixels.numpy()})
    expected = learner.score_images(pixels, learner.answering_expert[1])
    assert expected.shape == (3, 2)
    torch.testing.assert_close(torch.from_numpy(logits), expected, atol=2e-2, rtol=1e-3)
