"""Losses, penalties and selections of LwF, PRD, MAS, Tent and EATA inside a learner."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import tensor

from dosapp.experiments.plan import build_scenario
from dosapp.learner.learner import Learner
from dosapp.methods.eata import select_samples
from dosapp.methods.mas import MAS
from dosapp.testing.method_checks import train_learner
from support.formulas import softmax


@pytest.mark.parametrize("method", ["lwf", "prd"])
class TestDistillation:
    def losses(self, method, small, tiny, session: int, buffer_size: int = 0):
        """Per step of a session: the method's loss, CLIP's alone, and the replayed images."""
        settings = small(
            method=method, buffer_size=buffer_size, options={"distillation_weight": 1.0}
        )
        learner = Learner(settings.learner(), tiny)
        scenario = build_scenario(settings, tiny.preprocess)
        for t in range(session):
            learner.learn(scenario.session(t))
        losses, loss = [], learner.method.loss

        def record(student, batch):
            new = ~batch.replayed
            alone = student.clip_loss(batch.pixels[new], batch.labels[new])
            losses.append((loss(student, batch).item(), alone.item(), int(batch.replayed.sum())))
            return loss(student, batch)

        object.__setattr__(learner.method, "loss", record)
        learner.learn(scenario.session(session))
        return losses

    def test_the_first_session_is_fine_tuning(self, method, small, tiny) -> None:
        for loss, alone, _ in self.losses(method, small, tiny, 0):
            assert loss == pytest.approx(alone, rel=1e-4)

    def test_later_other_logits_are_penalised(self, method, small, tiny) -> None:
        losses = self.losses(method, small, tiny, 1)
        if method == "lwf":  # the previous model is the student when the session begins
            assert losses[0][0] == pytest.approx(losses[0][1], abs=1e-4)
        assert all(loss > alone for loss, alone, _ in losses[1:])

    def test_replayed_images_are_distilled_only(self, method, small, tiny) -> None:
        losses = self.losses(method, small, tiny, 1, buffer_size=12)
        assert all(replayed == 8 for *_, replayed in losses)
        assert all(loss > alone for loss, alone, _ in losses[1:])


class TestMAS:
    def test_the_penalty_is_omega_times_the_squared_distance(self) -> None:
        weights = {"w": tensor([1.0, 5.0]), "s": tensor(2.0)}
        student = SimpleNamespace(backbone=SimpleNamespace(weights=lambda: weights))
        method = MAS()
        method.importance = {"w": tensor([0.5, 1.0]), "s": tensor(3.0)}
        method.anchor = {"w": tensor([0.0, 3.0]), "s": tensor(1.0)}
        assert method.penalty(student).item() == 0.5 * 1 + 1.0 * 4 + 3 * 1

    def test_is_zero_in_the_first_session_and_not_after(self, small, tiny) -> None:
        settings = small(method="mas")
        learner = Learner(settings.learner(), tiny)
        scenario = build_scenario(settings, tiny.preprocess)
        penalties = [
            [
                learner.method.penalty(learner.student).item()
                for _ in learner.training_steps(scenario.session(t))
            ]
            for t in range(2)
        ]
        assert penalties[0] == [0.0] * len(penalties[0]) == [0.0] * len(penalties[1])
        assert all(penalty > 0 for penalty in penalties[1])

    def test_importance_has_rows_with_a_maximum_of_one(self, small, tiny) -> None:
        learner, _ = train_learner(small(method="mas"), tiny, 1)
        for omega in learner.method.importance.values():
            assert omega.min() >= 0
            assert omega.max() == pytest.approx(1)

    def test_a_stronger_penalty_keeps_weights_nearer(self, small, tiny) -> None:
        def distance(reg_lambda: float) -> float:
            settings = small(method="mas", options={"reg_lambda": reg_lambda})
            learner, scenario = train_learner(settings, tiny, 1)
            anchor = dict(learner.method.anchor)  # the next session replaces it
            learner.learn(scenario.session(1))
            weights = learner.student.backbone.weights()
            return sum(float((weights[n] - anchor[n]).detach().abs().sum()) for n in anchor)

        assert distance(1000.0) < distance(0.0)


def test_tent_trains_the_norms_of_the_image_tower_and_lowers_the_entropy(small, tiny) -> None:
    settings = small(method="zero-shot", adapt="tent", lr=1e-3)
    learner = Learner(settings.learner(), tiny)
    scenario = build_scenario(settings, tiny.preprocess)
    learner.learn(scenario.session(1))
    before = {n: w.detach().clone() for n, w in tiny.weights().items()}
    pixels = scenario.session(1).unlabelled.read(range(24))
    entropies = [learner.adapt(pixels).loss.item() for _ in range(6)]
    assert entropies[-1] < entropies[0]
    changed = {n for n, w in tiny.weights().items() if not torch.equal(w, before[n])}
    assert changed == set(tiny.image_norm_weights())
    assert len(changed) == 2 * (2 * 4 + 2)  # two in each block, one before and one after


class TestEATA:
    def test_selects_reliable_and_new_images_weighted_by_entropy(self) -> None:
        logits = tensor([[9.0, 0.0, 0.0], [0.1, 0.0, 0.0], [0.0, 9.0, 0.0]])
        limit = 0.4 * math.log(3)
        selected, weight = select_samples(logits, None, 0.4, 0.1)
        assert selected.tolist() == [True, False, True]
        p = softmax([9.0, 0.0, 0.0])
        by_hand = math.exp(limit + sum(a * math.log(a) for a in p))
        assert weight[0].item() == pytest.approx(by_hand, rel=1e-4)
        assert select_samples(logits, tensor(p), 0.4, 0.1)[0].tolist() == [False, False, True]

    def test_fisher_is_the_mean_squared_batch_gradient_of_its_own_labels(self, small, tiny) -> None:
        settings = small(method="zero-shot", adapt="eata")
        learner = Learner(settings.learner(), tiny)
        session = build_scenario(settings, tiny.preprocess).session(0)
        learner.learn(session)
        method, name = learner.method.unlabelled, "vision_model.post_layernorm.weight"
        weight = tiny.weights()[name].requires_grad_(True)
        pixels = session.train.read(range(len(session.train)))
        logits = learner.student.scaled_image_logits(pixels)
        loss = torch.nn.functional.cross_entropy(logits, logits.argmax(1))
        (grad,) = torch.autograd.grad(loss, weight)
        torch.testing.assert_close(method.fisher[name], grad.square())
        assert method.penalty(learner.student).item() == 0

    def test_no_step_if_no_image_is_selected(self, small, tiny) -> None:
        settings = small(method="zero-shot", adapt="eata")
        learner = Learner(settings.learner(), tiny)
        scenario = build_scenario(settings, tiny.preprocess)
        learner.learn(scenario.session(0))
        learner.method.unlabelled.mean_probs = torch.full((3,), 1 / 3)  # all images are redundant
        before = learner.digest()
        result = learner.adapt(scenario.session(1).unlabelled.read(range(12)))
        assert result.loss is None
        assert not result.stepped
        assert learner.digest() == before
