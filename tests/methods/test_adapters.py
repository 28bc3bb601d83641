"""RMT, CoTTA, NOTE, EcoTTA, PSMT and the reading of DSS against arithmetic written out here."""

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
from dosapp.methods.cotta import drawn
from dosapp.methods.ecotta import Meta
from dosapp.methods.psmt import least
from dosapp.methods.reservoir import Reservoir
from dosapp.methods.rmt import Projector
from dosapp.scenario import Session


@pytest.fixture
def adapting(small, tiny):
    """A learner that has met one session, its adapter, and pictures of the stream."""

    def make(adapt: str, method: str = "spu", **changes: object):
        settings = small(method=method, adapt=adapt, **changes)
        learner = Learner(settings.learner(), tiny.shared_copy(own=list(tiny.weights())))
        stream = build_scenario(settings, tiny.preprocess)
        learner.learn(stream.session(0))
        return learner, learner.method.unlabelled, stream.session(1).unlabelled.read(range(8))

    return make


class TestRMT:
    def test_symmetric_cross_entropy_is_half_of_each_direction(self) -> None:
        new, old = tensor([[1.0, 0.0, 2.0]]), tensor([[0.0, 1.0, 0.5]])
        p, q = new.softmax(1)[0], old.softmax(1)[0]
        by_hand = -0.5 * (q * p.log()).sum() - 0.5 * (p * q.log()).sum()
        assert symmetric_cross_entropy(new, old).item() == pytest.approx(by_hand.item())

    def test_contrast_attracts_the_views_of_one_instance(self) -> None:
        views = normalize(torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)), dim=2)
        flat = [views[v, b] for v in range(3) for b in range(2)]
        total = 0.0
        for i in range(6):
            others = [j for j in range(6) if j != i]
            below = sum(math.exp(float(flat[i] @ flat[j]) / 0.1) for j in others)
            same = [j for j in others if j % 2 == i % 2]
            total -= sum(float(flat[i] @ flat[j]) / 0.1 - math.log(below) for j in same) / 2
        assert supervised_contrastive_loss(views, 0.1).item() == pytest.approx(total / 6, rel=1e-4)

    def test_the_loss_is_both_terms_on_the_image_and_its_augmentation(self, adapting) -> None:
        learner, method, pixels = adapting("rmt")
        student = learner.student
        net, texts = student.backbone, student.encode_captions()
        old = method.teacher.logit_scale * student.logits(pixels, method.teacher)
        images = net.encode_image(pixels)
        moved = net.encode_image(augment(pixels, student.rng("rmt")))
        agree = sum(
            symmetric_cross_entropy(net.logit_scale * x @ texts.T, old).mean()
            for x in (images, moved)
        )
        known = normalize(torch.stack(list(method.prototypes.values())))
        raw = torch.stack(list(method.prototypes.values()))
        nearest = raw[(images @ known.T).argmax(1)]
        project = find_wrapper(net, Projector)
        views = project(torch.stack([nearest, images, moved]))
        by_hand = agree / 2 + supervised_contrastive_loss(views, 0.1)
        assert method.stream_loss(student, pixels).loss.item() == pytest.approx(by_hand.item())

    def test_prototypes_are_mean_features_of_each_class_when_it_was_taught(
        self, small, tiny
    ) -> None:
        settings = small(method="zero-shot", adapt="rmt")
        learner = Learner(settings.learner(), tiny)
        session = build_scenario(settings, tiny.preprocess).session(0)
        learner.learn(session)
        rows = np.flatnonzero(session.train.labels == 1)
        mean = tiny.encode_image(session.train.read(rows)).mean(dim=0)
        torch.testing.assert_close(learner.method.unlabelled.prototypes[1], mean)

    def test_the_answer_is_the_mean_of_student_and_teacher(self, adapting) -> None:
        learner, method, pixels = adapting("rmt", lr=1e-2)
        learner.adapt(pixels)
        experts = method.experts(learner.student)
        assert list(experts) == ["ensemble", "teacher", "student"]
        both, teacher, student = (learner.logits(pixels, e) for e in experts.values())
        torch.testing.assert_close(both, (teacher + student) / 2)
        assert isinstance(experts["ensemble"], Ensemble)
        assert not torch.allclose(teacher, student)

    def test_the_teacher_follows_slowly(self, adapting) -> None:
        learner, method, pixels = adapting("rmt", options={"momentum": 0.9})
        student, name = learner.student, next(iter(learner.student.backbone.first_mlp_weights()))
        before = method.teacher.weights()[name].clone()
        learner.adapt(pixels)
        now = student.backbone.weights()[name]
        mask = student.selection.mask[name]
        expected = torch.where(mask, 0.9 * before + 0.1 * now, before)
        torch.testing.assert_close(method.teacher.weights()[name], expected.detach())

    def test_a_class_without_images_has_no_prototype_and_is_a_sentence(self, pupil, tiny) -> None:
        learner = Learner(pupil(method="spu", adapt="rmt"), tiny)
        full = Session.from_images({"a": torch.zeros(9, 3, 32, 32, dtype=torch.uint8)})
        empty = Session(("a", "b"), dict.fromkeys("ab", full.prompts["a"]), full.train,
                        full.unlabelled)  # fmt: skip
        before = learner.digest()
        with pytest.raises(InputError, match="class 'b' has no training images, so rmt"):
            learner.learn(empty)
        assert learner.digest() == before
        assert learner.classes == []


class TestCoTTA:
    def test_restores_each_entry_that_may_move_with_the_given_chance(self, adapting) -> None:
        learner, _, _ = adapting("cotta", "flyp")
        generator = torch.Generator().manual_seed(0)
        hits = drawn(learner.student, 0.01, generator)
        total = sum(m.numel() for m in hits.values())
        share = sum(int(m.sum()) for m in hits.values()) / total
        assert total > 1e6
        assert share == pytest.approx(0.01, abs=4 * (0.01 * 0.99 / total) ** 0.5)

    def test_inside_the_mask_only(self, adapting) -> None:
        learner, _, _ = adapting("cotta")
        for name, hit in drawn(learner.student, 0.5, torch.Generator().manual_seed(0)).items():
            mask = learner.student.selection.mask[name]
            assert not (hit & ~mask).any()
            assert int(hit.sum()) == pytest.approx(0.5 * int(mask.sum()), rel=0.1)

    def test_restored_entries_are_where_the_lessons_ended(self, adapting) -> None:
        learner, method, pixels = adapting("cotta", options={"restore": 1.0})
        ended = {n: w.detach().clone() for n, w in learner.student.backbone.weights().items()}
        learner.adapt(pixels)
        now = learner.student.backbone.weights()
        assert all(torch.equal(now[n], w) for n, w in ended.items())
        teacher = method.teacher.weights()
        assert any(not torch.equal(teacher[n], w) for n, w in ended.items())  # it did move once

    def test_averages_views_only_where_the_source_is_unsure(self, adapting) -> None:
        learner, method, pixels = adapting("cotta", options={"unsure": 0.0})
        student = learner.student
        plain = method.taught(student, pixels)
        assert torch.equal(method.teachers_mean(student, pixels), plain)
        learner, method, pixels = adapting("cotta", options={"unsure": 1.0, "views": 3})
        student, generator = learner.student, learner.student.rng("cotta")
        texts = student.encode_captions(method.teacher)
        views = [
            method.teacher.logit_scale
            * method.teacher.encode_image(augment(pixels, generator))
            @ texts.T
            for _ in range(3)
        ]
        by_hand = sum(views) / 3
        torch.testing.assert_close(method.teachers_mean(student, pixels), by_hand)


class TestNOTE:
    def fill(self, labels, capacity=12):
        reservoir, generator = Reservoir(capacity), torch.Generator().manual_seed(0)
        for n, label in enumerate(labels):
            reservoir.offer(torch.full((1,), float(n)), label, generator)
        return reservoir

    def test_a_skewed_stream_leaves_a_balanced_reservoir(self) -> None:
        labels = [0] * 200 + [1] * 6 + [0] * 50 + [2] * 6
        assert Counter(self.fill(labels).labels) == {0: 4, 1: 4, 2: 4}

    def test_one_class_is_sampled_evenly_over_time(self) -> None:
        held = [int(p) for p in self.fill([0] * 4000, capacity=200).pictures]
        assert np.mean(held) == pytest.approx(2000, abs=4 * 4000 / 12**0.5 / 200**0.5)

    def test_learns_from_the_reservoir_and_says_that_it_stores_pictures(
        self, adapting, tmp_path
    ) -> None:
        learner, method, pixels = adapting("note", options={"capacity": 3})
        learner.adapt(pixels)
        assert len(method.reservoir.pictures) == 3
        assert learner.method.stores_data
        learner.save(tmp_path / "x")
        from safetensors import safe_open

        def held(path):
            with safe_open(path, "pt") as file:
                return [k for k in file.keys() if "pictures" in k]

        assert not any(held(p) for p in (tmp_path / "x" / "versions").iterdir())
        assert '"stores_images": true' in (tmp_path / "x" / "learner.json").read_text()

    def test_the_loss_is_the_entropy_of_the_reservoir_over_the_number_of_classes(
        self, adapting
    ) -> None:
        learner, method, pixels = adapting("note")
        loss = method.stream_loss(learner.student, pixels).loss.item()
        logits = learner.student.image_logits(torch.stack(method.reservoir.pictures))
        p = logits.detach().softmax(1)
        assert loss == pytest.approx(float(-(p * p.log()).sum(1).mean() / 3), rel=1e-4)


class TestEcoTTA:
    def test_begins_as_the_network_it_stands_beside(self, tiny) -> None:
        pixels = torch.rand(2, 3, 32, 32)
        meta = Meta(tiny, 5, 16, 0)
        torch.testing.assert_close(meta.encode_image(pixels), tiny.encode_image(pixels))
        assert meta.ends == [0, 1, 2, 3]
        assert [s.item() for s in meta.strayed] == [0, 0, 0, 0]

    def test_twelve_blocks_are_cut_in_two_two_two_two_four(self, tiny) -> None:
        tiny.blocks = 12
        assert Meta(tiny, 5, 16, 0).ends == [1, 3, 5, 7, 11]

    def test_a_joint_is_an_affine_map_and_a_bottleneck(self, tiny) -> None:
        meta = Meta(tiny, 4, 2, 0)
        with torch.no_grad():
            for name, weight in meta.extra.items():
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
                scale, shift, down, up = (
                    meta.extra[f"ecotta.2.{part}"] for part in ("scale", "shift", "down", "up")
                )
                assert name
        entered, left = torch.randn(1, 3, 128), torch.randn(1, 3, 128)
        by_hand = left * scale + shift + torch.clamp(entered @ down, min=0) @ up
        torch.testing.assert_close(meta._joint(2)(entered, left), by_hand)
        torch.testing.assert_close(meta.strayed[-1], (by_hand - left).abs().mean())

    def test_trains_the_meta_networks_only_after_a_warm_up_on_the_lessons(
        self, small, tiny
    ) -> None:
        settings = small(method="zero-shot", adapt="ecotta")
        learner = Learner(settings.learner(), tiny)
        before = {n: w.detach().clone() for n, w in tiny.weights().items()}
        stream = build_scenario(settings, tiny.preprocess)
        lessons = list(learner.training_steps(stream.session(0)))
        assert len(lessons) == 3  # one pass
        meta = find_wrapper(learner.student.backbone, Meta)
        assert meta.extra["ecotta.0.up"].any()
        warm = meta.extra["ecotta.0.up"].detach().clone()
        learner.adapt(stream.session(0).unlabelled.read(range(8)))
        assert not torch.equal(meta.extra["ecotta.0.up"], warm)
        assert all(torch.equal(tiny.weights()[n], w) for n, w in before.items())


class TestPSMT:
    def test_puts_back_the_entries_with_the_least_information(self) -> None:
        information = {"a": torch.arange(100.0).view(10, 10), "b": torch.arange(100.0)}
        mask = {"a": torch.ones(10, 10, dtype=torch.bool)}
        mask["a"][0] = False  # 0 to 9 of a may not move
        where = least(information, mask, 0.1)
        assert int(where["b"].sum()) + int(where["a"].sum()) == 19  # of 189: one has none at all
        assert not where["a"][0].any()
        assert where["b"].nonzero().squeeze(1).tolist() == list(range(1, 15))

    def test_entries_without_a_gradient_do_not_fill_the_share(self, adapting) -> None:
        """After FLYP some words' embeddings have none: more than the share that goes back."""
        learner, _, pixels = adapting("psmt", "flyp")
        learner.adapt(pixels)
        grads = {n: g.square() for n, g in learner.student.last_gradients().items()}
        none = sum(int((g == 0).sum()) for g in grads.values())
        total = sum(g.numel() for g in grads.values())
        assert none / total > 0.03
        back = sum(int(m.sum()) for m in least(grads, {}, 0.03).values())
        assert back == pytest.approx(0.03 * (total - none), rel=1e-3)

    def test_restored_entries_are_the_sources_in_student_and_teacher(self, adapting) -> None:
        learner, method, pixels = adapting("psmt", options={"restore": 0.5})
        source = {n: w.clone() for n, w in method.source.items()}
        learner.adapt(pixels)
        student, teacher = learner.student.backbone.weights(), method.teacher.weights()
        grads = {n: g.square() for n, g in learner.student.last_gradients().items()}
        where = least(grads, learner.student.selection.mask, 0.5)
        back = moved = 0
        for name, hit in where.items():
            assert torch.equal(student[name][hit], source[name][hit])
            assert torch.equal(teacher[name][hit], source[name][hit])
            back += int(hit.sum())
            moved += int((student[name] != source[name]).sum())
        assert moved == pytest.approx(back, rel=0.1)

    def test_the_pull_is_fisher_times_the_squared_way(self, adapting) -> None:
        learner, method, pixels = adapting("psmt", options={"restore": 0.0})
        learner.adapt(pixels)
        student = learner.student
        weights = student.backbone.weights()
        penalty = sum(
            float((f * (weights[n] - method.source[n]).detach() ** 2).sum())
            for n, f in method.fisher.items()
        )
        new, old = method.logits(student, pixels), method.taught(student, pixels)
        by_hand = symmetric_cross_entropy(new, old).mean().item() + 500 * penalty
        assert penalty > 0
        assert method.stream_loss(student, pixels).loss.item() == pytest.approx(by_hand, rel=1e-4)


class TestDSS:
    def test_negative_learning_is_minus_log_of_not_being_it(self) -> None:
        logits = tensor([[2.0, 0.0, -1.0]])
        p = logits.softmax(1)[0]
        by_hand = -(math.log(1 - p[1]) + math.log(1 - p[2])) / 2
        excluded = tensor([[False, True, True]])
        assert complementary_loss(logits, excluded).item() == pytest.approx(by_hand, rel=1e-4)

    def test_splits_at_a_moving_mean_of_confidence(self, adapting) -> None:
        learner, method, pixels = adapting("dss-style")
        student = learner.student
        guess = method.stream_loss(student, pixels)
        sure = method.taught(student, pixels).softmax(1).max(1)
        assert method.threshold == pytest.approx(sure.values.mean().item(), rel=1e-5)
        new, total = method.logits(student, pixels).detach(), 0.0
        old = method.taught(student, pixels).softmax(1)
        for n in range(len(pixels)):
            p = new[n].softmax(0)
            if sure.values[n] >= method.threshold:
                total -= math.log(p[sure.indices[n]])
            else:
                away = [-math.log(1 - min(float(p[c]), 1 - 1e-6)) for c in range(3)
                        if old[n, c] < 1 / 3]  # fmt: skip
                total += sum(away) / max(1, len(away))
        assert guess.loss.item() == pytest.approx(total / len(pixels), rel=1e-3)
        method.threshold = 0.5
        method.stream_loss(student, pixels)
        expected = 0.9 * 0.5 + 0.1 * sure.values.mean().item()
        assert method.threshold == pytest.approx(expected, rel=1e-5)


class TestAugmentation:
    pixels = torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def test_stays_a_picture_and_leaves_the_original_alone(self) -> None:
        before = self.pixels.clone()
        changed = augment(self.pixels, torch.Generator().manual_seed(1))
        assert torch.equal(self.pixels, before)
        assert changed.shape == before.shape
        assert changed.min() >= 0
        assert changed.max() <= 1
        again = augment(self.pixels, torch.Generator().manual_seed(1))
        assert torch.equal(changed, again)

    def test_changes_each_picture_in_its_own_way(self) -> None:
        same = self.pixels[:1].repeat(8, 1, 1, 1)
        changed = augment(same, torch.Generator().manual_seed(2))
        apart = (changed[:, None] - changed[None]).abs().mean(dim=(2, 3, 4))
        assert (apart + torch.eye(8)).min() > 0.01

    def test_about_half_are_mirrored(self) -> None:
        dark = torch.zeros(200, 3, 32, 32)
        dark[..., :16] = 1.0  # the left half is bright
        changed = augment(dark, torch.Generator().manual_seed(3))
        right = changed[..., 16:].mean(dim=(1, 2, 3)) > changed[..., :16].mean(dim=(1, 2, 3))
        assert 70 < int(right.sum()) < 130
