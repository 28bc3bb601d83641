"""RMT, CoTTA, NOTE, EcoTTA, PSMT and DSS-style, checked by hand."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import tensor
from torch.nn.functional import normalize

from dosapp.backbones.wrappers import Ensemble, find_wrapper
from dosapp.errors import InputError
from dosapp.experiments.plan import build_scenario
from dosapp.functional.augmentation import augment
from dosapp.functional.losses import (
    complementary_loss,
    supervised_contrastive_loss,
    symmetric_cross_entropy,
)
from dosapp.learner.learner import Learner
from dosapp.methods.cotta import random_mask
from dosapp.methods.ecotta import MetaNetworks
from dosapp.methods.note_reservoir import BalancedReservoir
from dosapp.methods.psmt import least_important
from dosapp.methods.rmt import Projector
from dosapp.scenario import Session


@pytest.fixture
def train_before_stream(small, tiny):
    """A learner after one session, its unlabelled method, and images of a stream."""

    def make(adapt: str, method: str = "spu", **changes: object):
        settings = small(method=method, adapt=adapt, **changes)
        learner = Learner(settings.learner(), tiny.shared_copy(unshared=list(tiny.weights())))
        scenario = build_scenario(settings, tiny.preprocess)
        learner.learn(scenario.session(0))
        return learner, learner.method.unlabelled, scenario.session(1).unlabelled.read(range(8))

    return make


class TestRMT:
    def test_symmetric_cross_entropy_is_half_of_each_direction(self) -> None:
        new, old = tensor([[1.0, 0.0, 2.0]]), tensor([[0.0, 1.0, 0.5]])
        p, q = new.softmax(1)[0], old.softmax(1)[0]
        by_hand = -0.5 * (q * p.log()).sum() - 0.5 * (p * q.log()).sum()
        assert symmetric_cross_entropy(new, old).item() == pytest.approx(by_hand.item())

    def test_the_contrastive_loss_attracts_the_views_of_one_instance(self) -> None:
        views = normalize(torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)), dim=2)
        flat = [views[v, b] for v in range(3) for b in range(2)]
        total = 0.0
        for i in range(6):
            others = [j for j in range(6) if j != i]
            below = sum(math.exp(float(flat[i] @ flat[j]) / 0.1) for j in others)
            same = [j for j in others if j % 2 == i % 2]
            total -= sum(float(flat[i] @ flat[j]) / 0.1 - math.log(below) for j in same) / 2
        assert supervised_contrastive_loss(views, 0.1).item() == pytest.approx(total / 6, rel=1e-4)

    def test_the_loss_has_both_terms_on_the_image_and_its_augmentation(
        self, train_before_stream
    ) -> None:
        learner, method, pixels = train_before_stream("rmt")
        student = learner.student
        net, texts = student.backbone, student.encode_captions()
        old = method.teacher.logit_scale * student.score_images(pixels, method.teacher)
        images = net.encode_image(pixels)
        augmented = net.encode_image(augment(pixels, student.rng("rmt")))
        cross_entropies = sum(
            symmetric_cross_entropy(net.logit_scale * x @ texts.T, old).mean()
            for x in (images, augmented)
        )
        prototypes = torch.stack(list(method.prototypes.values()))
        nearest = prototypes[(images @ normalize(prototypes).T).argmax(1)]
        project = find_wrapper(net, Projector)
        views = project(torch.stack([nearest, images, augmented]))
        by_hand = cross_entropies / 2 + supervised_contrastive_loss(views, 0.1)
        assert method.stream_loss(student, pixels).loss.item() == pytest.approx(by_hand.item())

    def test_prototypes_are_mean_features_at_the_end_of_the_session(self, small, tiny) -> None:
        settings = small(method="zero-shot", adapt="rmt")
        learner = Learner(settings.learner(), tiny)
        session = build_scenario(settings, tiny.preprocess).session(0)
        learner.learn(session)
        rows = np.flatnonzero(session.train.labels == 1)
        mean = tiny.encode_image(session.train.read(rows)).mean(dim=0)
        torch.testing.assert_close(learner.method.unlabelled.prototypes[1], mean)

    def test_student_and_teacher_answer_together(self, train_before_stream) -> None:
        learner, method, pixels = train_before_stream("rmt", lr=1e-2)
        learner.adapt(pixels)
        experts = method.experts(learner.student)
        assert list(experts) == ["ensemble", "teacher", "student"]
        both, teacher, student = (learner.score_images(pixels, e) for e in experts.values())
        torch.testing.assert_close(both, (teacher + student) / 2)
        assert isinstance(experts["ensemble"], Ensemble)
        assert not torch.allclose(teacher, student)

    def test_the_teacher_is_an_exponential_moving_average(self, train_before_stream) -> None:
        learner, method, pixels = train_before_stream("rmt", options={"momentum": 0.9})
        student, name = learner.student, next(iter(learner.student.backbone.first_mlp_weights()))
        before = method.teacher.weights()[name].clone()
        learner.adapt(pixels)
        now = student.backbone.weights()[name]
        mask = student.selection.mask[name]
        expected = torch.where(mask, 0.9 * before + 0.1 * now, before)
        torch.testing.assert_close(method.teacher.weights()[name], expected.detach())

    def test_a_class_without_images_is_an_error(self, learner_settings, tiny) -> None:
        learner = Learner(learner_settings(method="spu", adapt="rmt"), tiny)
        full = Session.from_images({"a": torch.zeros(9, 3, 32, 32, dtype=torch.uint8)})
        empty = Session(("a", "b"), dict.fromkeys("ab", full.prompts["a"]), full.train,
                        full.unlabelled)  # fmt: skip
        before = learner.digest()
        with pytest.raises(InputError, match="class 'b' has no training images, so rmt"):
            learner.learn(empty)
        assert learner.digest() == before
        assert learner.classes == []


class TestCoTTA:
    def test_restores_each_trainable_entry_with_the_given_probability(
        self, train_before_stream
    ) -> None:
        learner, _, _ = train_before_stream("cotta", "flyp")
        generator = torch.Generator().manual_seed(0)
        mask = random_mask(learner.student, 0.01, generator)
        total = sum(m.numel() for m in mask.values())
        share = sum(int(m.sum()) for m in mask.values()) / total
        assert total > 1e6
        assert share == pytest.approx(0.01, abs=4 * (0.01 * 0.99 / total) ** 0.5)

    def test_inside_the_mask_only(self, train_before_stream) -> None:
        learner, _, _ = train_before_stream("cotta")
        generator = torch.Generator().manual_seed(0)
        for name, drawn in random_mask(learner.student, 0.5, generator).items():
            mask = learner.student.selection.mask[name]
            assert not (drawn & ~mask).any()
            assert int(drawn.sum()) == pytest.approx(0.5 * int(mask.sum()), rel=0.1)

    def test_restored_entries_are_those_of_the_session_end(self, train_before_stream) -> None:
        learner, method, pixels = train_before_stream("cotta", options={"restore_prob": 1.0})
        source = {n: w.detach().clone() for n, w in learner.student.backbone.weights().items()}
        learner.adapt(pixels)
        now = learner.student.backbone.weights()
        assert all(torch.equal(now[n], w) for n, w in source.items())
        teacher = method.teacher.weights()
        assert any(not torch.equal(teacher[n], w) for n, w in source.items())  # from before that

    def test_averages_augmentations_only_if_the_source_is_not_confident(
        self, train_before_stream
    ) -> None:
        learner, method, pixels = train_before_stream("cotta", options={"ap": 0.0})
        student = learner.student
        plain = method.teacher_logits(student, pixels)
        assert torch.equal(method.averaged_logits(student, pixels), plain)
        learner, method, pixels = train_before_stream(
            "cotta", options={"ap": 1.0, "num_augmentations": 3}
        )
        student, generator = learner.student, learner.student.rng("cotta")
        texts = student.encode_captions(method.teacher)
        views = [
            method.teacher.logit_scale
            * method.teacher.encode_image(augment(pixels, generator))
            @ texts.T
            for _ in range(3)
        ]
        by_hand = sum(views) / 3
        torch.testing.assert_close(method.averaged_logits(student, pixels), by_hand)


class TestNOTE:
    def fill(self, labels, capacity=12):
        reservoir, generator = BalancedReservoir(capacity), torch.Generator().manual_seed(0)
        for n, label in enumerate(labels):
            reservoir.add(torch.full((1,), float(n)), label, generator)
        return reservoir

    def test_a_skewed_stream_leaves_a_balanced_reservoir(self) -> None:
        labels = [0] * 200 + [1] * 6 + [0] * 50 + [2] * 6
        assert Counter(self.fill(labels).labels) == {0: 4, 1: 4, 2: 4}

    def test_one_class_is_sampled_evenly_over_time(self) -> None:
        stored = [int(image) for image in self.fill([0] * 4000, capacity=200).images]
        assert np.mean(stored) == pytest.approx(2000, abs=4 * 4000 / 12**0.5 / 200**0.5)

    def test_a_saved_learner_tells_that_it_stores_images(
        self, train_before_stream, tmp_path
    ) -> None:
        learner, method, pixels = train_before_stream("note", options={"memory_size": 3})
        learner.adapt(pixels)
        assert len(method.reservoir.images) == 3
        assert learner.method.stores_data
        learner.save(tmp_path / "x")
        from safetensors import safe_open

        def image_tensors(path):
            with safe_open(path, "pt") as file:
                return [k for k in file.keys() if "pictures" in k]

        assert not any(image_tensors(p) for p in (tmp_path / "x" / "versions").iterdir())
        assert '"stores_images": true' in (tmp_path / "x" / "learner.json").read_text()

    def test_the_loss_is_the_entropy_of_the_reservoir_over_the_number_of_classes(
        self, train_before_stream
    ) -> None:
        learner, method, pixels = train_before_stream("note")
        loss = method.stream_loss(learner.student, pixels).loss.item()
        logits = learner.student.scaled_image_logits(torch.stack(method.reservoir.images))
        p = logits.detach().softmax(1)
        assert loss == pytest.approx(float(-(p * p.log()).sum(1).mean() / 3), rel=1e-4)


class TestEcoTTA:
    def test_starts_as_the_frozen_network(self, tiny) -> None:
        pixels = torch.rand(2, 3, 32, 32)
        meta = MetaNetworks(tiny, 5, 16, 0)
        torch.testing.assert_close(meta.encode_image(pixels), tiny.encode_image(pixels))
        assert meta.last_blocks == [0, 1, 2, 3]
        assert [d.item() for d in meta.deviations] == [0, 0, 0, 0]

    def test_twelve_blocks_are_split_in_two_two_two_two_four(self, tiny) -> None:
        tiny.num_blocks = 12
        assert MetaNetworks(tiny, 5, 16, 0).last_blocks == [1, 3, 5, 7, 11]

    def test_a_meta_network_is_an_affine_map_and_a_bottleneck(self, tiny) -> None:
        meta = MetaNetworks(tiny, 4, 2, 0)
        with torch.no_grad():
            for name, weight in meta.added.items():
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
                scale, shift, down, up = (
                    meta.added[f"ecotta.2.{part}"] for part in ("scale", "shift", "down", "up")
                )
                assert name
        inputs, outputs = torch.randn(1, 3, 128), torch.randn(1, 3, 128)
        by_hand = outputs * scale + shift + torch.clamp(inputs @ down, min=0) @ up
        torch.testing.assert_close(meta.block_hook(2)(inputs, outputs), by_hand)
        torch.testing.assert_close(meta.deviations[-1], (by_hand - outputs).abs().mean())

    def test_trains_only_the_meta_networks_after_a_warm_up(self, small, tiny) -> None:
        settings = small(method="zero-shot", adapt="ecotta")
        learner = Learner(settings.learner(), tiny)
        before = {n: w.detach().clone() for n, w in tiny.weights().items()}
        scenario = build_scenario(settings, tiny.preprocess)
        steps = list(learner.training_steps(scenario.session(0)))
        assert len(steps) == 3  # one epoch
        meta = find_wrapper(learner.student.backbone, MetaNetworks)
        assert meta.added["ecotta.0.up"].any()
        warm = meta.added["ecotta.0.up"].detach().clone()
        learner.adapt(scenario.session(0).unlabelled.read(range(8)))
        assert not torch.equal(meta.added["ecotta.0.up"], warm)
        assert all(torch.equal(tiny.weights()[n], w) for n, w in before.items())


class TestPSMT:
    def test_selects_the_least_important_entries(self) -> None:
        importance = {"a": torch.arange(100.0).view(10, 10), "b": torch.arange(100.0)}
        mask = {"a": torch.ones(10, 10, dtype=torch.bool)}
        mask["a"][0] = False  # 0 to 9 of a are frozen
        least = least_important(importance, mask, 0.1)
        assert int(least["b"].sum()) + int(least["a"].sum()) == 19  # of 189: one is zero
        assert not least["a"][0].any()
        assert least["b"].nonzero().squeeze(1).tolist() == list(range(1, 15))

    def test_entries_without_a_gradient_do_not_fill_the_share(self, train_before_stream) -> None:
        """After FLYP many token embeddings have none: more than the share that is restored."""
        learner, _, pixels = train_before_stream("psmt", "flyp")
        learner.adapt(pixels)
        grads = {n: g.square() for n, g in learner.student.last_gradients().items()}
        none = sum(int((g == 0).sum()) for g in grads.values())
        total = sum(g.numel() for g in grads.values())
        assert none / total > 0.03
        restored = sum(int(m.sum()) for m in least_important(grads, {}, 0.03).values())
        assert restored == pytest.approx(0.03 * (total - none), rel=1e-3)

    def test_restores_entries_of_student_and_teacher_to_the_source(
        self, train_before_stream
    ) -> None:
        learner, method, pixels = train_before_stream("psmt", options={"restore_ratio": 0.5})
        source = {n: w.clone() for n, w in method.source.items()}
        learner.adapt(pixels)
        student, teacher = learner.student.backbone.weights(), method.teacher.weights()
        grads = {n: g.square() for n, g in learner.student.last_gradients().items()}
        least = least_important(grads, learner.student.selection.mask, 0.5)
        restored = changed = 0
        for name, mask in least.items():
            assert torch.equal(student[name][mask], source[name][mask])
            assert torch.equal(teacher[name][mask], source[name][mask])
            restored += int(mask.sum())
            changed += int((student[name] != source[name]).sum())
        assert changed == pytest.approx(restored, rel=0.1)

    def test_the_penalty_is_fisher_times_the_squared_distance(self, train_before_stream) -> None:
        learner, method, pixels = train_before_stream("psmt", options={"restore_ratio": 0.0})
        learner.adapt(pixels)
        student = learner.student
        weights = student.backbone.weights()
        penalty = sum(
            float((f * (weights[n] - method.source[n]).detach() ** 2).sum())
            for n, f in method.fisher.items()
        )
        new, old = method.student_logits(student, pixels), method.teacher_logits(student, pixels)
        by_hand = symmetric_cross_entropy(new, old).mean().item() + 500 * penalty
        assert penalty > 0
        assert method.stream_loss(student, pixels).loss.item() == pytest.approx(by_hand, rel=1e-4)


class TestDSS:
    def test_negative_learning_is_minus_log_of_one_minus_p(self) -> None:
        logits = tensor([[2.0, 0.0, -1.0]])
        p = logits.softmax(1)[0]
        by_hand = -(math.log(1 - p[1]) + math.log(1 - p[2])) / 2
        excluded = tensor([[False, True, True]])
        assert complementary_loss(logits, excluded).item() == pytest.approx(by_hand, rel=1e-4)

    def test_splits_at_a_moving_mean_of_confidence(self, train_before_stream) -> None:
        learner, method, pixels = train_before_stream("dss-style")
        student = learner.student
        result = method.stream_loss(student, pixels)
        old = method.teacher_logits(student, pixels).softmax(1)
        confidence, labels = old.max(1)
        assert method.threshold == pytest.approx(confidence.mean().item(), rel=1e-5)
        new, total = method.student_logits(student, pixels).detach().softmax(1), 0.0
        for p, q, c, label in zip(new, old, confidence, labels, strict=True):
            if c >= method.threshold:
                total -= math.log(p[label])
            else:
                unlikely = [min(float(p[k]), 1 - 1e-6) for k in range(3) if q[k] < 1 / 3]
                total -= sum(math.log(1 - x) for x in unlikely) / max(1, len(unlikely))
        assert result.loss.item() == pytest.approx(total / len(pixels), rel=1e-3)
        method.threshold = 0.5
        method.stream_loss(student, pixels)
        expected = 0.9 * 0.5 + 0.1 * confidence.mean().item()
        assert method.threshold == pytest.approx(expected, rel=1e-5)


class TestAugmentation:
    pixels = torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def test_returns_valid_pixels_and_leaves_its_input_unchanged(self) -> None:
        before = self.pixels.clone()
        changed = augment(self.pixels, torch.Generator().manual_seed(1))
        assert torch.equal(self.pixels, before)
        assert changed.shape == before.shape
        assert changed.min() >= 0
        assert changed.max() <= 1
        again = augment(self.pixels, torch.Generator().manual_seed(1))
        assert torch.equal(changed, again)

    def test_augments_each_image_differently(self) -> None:
        same = self.pixels[:1].repeat(8, 1, 1, 1)
        changed = augment(same, torch.Generator().manual_seed(2))
        distances = (changed[:, None] - changed[None]).abs().mean(dim=(2, 3, 4))
        assert (distances + torch.eye(8)).min() > 0.01

    def test_about_half_are_mirrored(self) -> None:
        dark = torch.zeros(200, 3, 32, 32)
        dark[..., :16] = 1.0  # the left half is bright
        changed = augment(dark, torch.Generator().manual_seed(3))
        right = changed[..., 16:].mean(dim=(1, 2, 3)) > changed[..., :16].mean(dim=(1, 2, 3))
        assert 70 < int(right.sum()) < 130
