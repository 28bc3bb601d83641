"""The other methods' formulas, against arithmetic written out here."""

import math

import pytest
import torch
from torch import tensor

from dosapp.experiments.plan import build_scenario
from dosapp.functional.losses import distillation_loss, entropy, relation_distillation_loss
from dosapp.learner.learner import Learner
from dosapp.methods.eata import select_samples
from dosapp.methods.lwf import LwF
from dosapp.methods.mas import MAS
from dosapp.methods.prd import PRD
from support import method_checks


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(v) for v in values]
    return [p / sum(powers) for p in powers]


class TestLwF:
    old, new = tensor([[2.0, 0.0]]), tensor([[0.0, 0.0]])

    def test_is_kl_of_the_old_from_the_new_softened_and_summed(self) -> None:
        p, q = softmax([2 / 5, 0]), [0.5, 0.5]
        by_hand = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        assert distillation_loss(self.new, self.old, 5.0).item() == pytest.approx(by_hand, rel=1e-4)
        twice = distillation_loss(self.new.repeat(2, 1), self.old.repeat(2, 1), 5.0)
        assert twice.item() == pytest.approx(2 * by_hand, rel=1e-4)

    def test_the_other_direction_is_another_number(self) -> None:
        there = distillation_loss(self.new, self.old, 1.0)
        back = distillation_loss(self.old, self.new, 1.0)
        assert there.item() != pytest.approx(back.item(), rel=1e-2)

    def test_nothing_changed_costs_nothing(self) -> None:
        assert distillation_loss(self.old, self.old, 5.0).item() == pytest.approx(0, abs=1e-6)


def test_prd_compares_the_softmax_over_images_of_each_caption() -> None:
    old, new = tensor([[1.0, 0.0], [0.0, 3.0]]), tensor([[2.0, 0.0], [0.0, 0.0]])
    total = 0.0
    for caption in range(2):
        q, p = softmax(old[:, caption].tolist()), softmax(new[:, caption].tolist())
        total -= sum(a * math.log(b) for a, b in zip(q, p, strict=True))
    assert relation_distillation_loss(new, old, 1.0).item() == pytest.approx(total / 2)


def test_entropy_by_hand() -> None:
    p = softmax([1.0, 0.0])
    by_hand = -sum(a * math.log(a) for a in p)
    found = entropy(tensor([[1.0, 0.0], [5.0, 5.0]]))
    assert found.tolist() == pytest.approx([by_hand, math.log(2)])


@pytest.mark.parametrize("kind", [LwF, PRD])
class TestDistilled:
    def losses(self, kind, small, tiny, session: int, memory: int = 0):
        """The method's loss and the CLIP loss alone, in the middle of a session."""
        name = kind.__name__.lower()
        settings = small(method=name, memory=memory, options={"weight": 1.0})
        learner = Learner(settings.learner(), tiny)
        stream = build_scenario(settings, tiny.preprocess)
        seen = []
        for t in range(session):
            for _ in learner.training_steps(stream.session(t)):
                pass
        keep = learner.method.loss

        def both(student, batch):
            now = ~batch.replayed
            alone = student.clip_loss(batch.pixels[now], batch.labels[now])
            seen.append((keep(student, batch).item(), alone.item(), int(batch.replayed.sum())))
            return keep(student, batch)

        object.__setattr__(learner.method, "loss", both)
        for _ in learner.training_steps(stream.session(session)):
            pass
        return seen

    def test_the_first_session_is_fine_tuning(self, kind, small, tiny) -> None:
        for loss, alone, _ in self.losses(kind, small, tiny, 0):
            assert loss == pytest.approx(alone, rel=1e-4)

    def test_later_it_costs_to_answer_differently(self, kind, small, tiny) -> None:
        seen = self.losses(kind, small, tiny, 1)
        if kind is LwF:  # the old model is the student when the session begins
            assert seen[0][0] == pytest.approx(seen[0][1], abs=1e-4)
        assert all(loss > alone for loss, alone, _ in seen[1:])

    def test_replayed_images_are_kept_but_not_taught(self, kind, small, tiny) -> None:
        seen = self.losses(kind, small, tiny, 1, buffer_size=12)
        assert all(replayed == 8 for *_, replayed in seen)
        assert all(loss > alone for loss, alone, _ in seen[1:])


class TestMAS:
    def test_the_penalty_is_omega_times_the_squared_way(self) -> None:
        class Net:
            def weights(self):
                return {"w": tensor([1.0, 5.0]), "s": tensor(2.0)}

        class Pupil:
            net = Net()

        method = MAS()
        method.importance = {"w": tensor([0.5, 1.0]), "s": tensor(3.0)}
        method.anchor = {"w": tensor([0.0, 3.0]), "s": tensor(1.0)}
        assert method.penalty(Pupil()).item() == 0.5 * 1 + 1.0 * 4 + 3 * 1

    def test_is_zero_in_the_first_session_and_not_after(self, small, tiny) -> None:
        settings = small(method="mas")
        learner = Learner(settings.learner(), tiny)
        stream = build_scenario(settings, tiny.preprocess)
        penalties = []
        for t in range(2):
            for _ in learner.training_steps(stream.session(t)):
                penalties.append(learner.method.penalty(learner.student).item())
        assert penalties[: len(penalties) // 2] == [0.0] * (len(penalties) // 2)
        assert all(p > 0 for p in penalties[len(penalties) // 2 :])

    def test_importance_has_rows_with_a_maximum_of_one(self, small, tiny) -> None:
        learner, _ = method_checks.lived(small(method="mas"), tiny, 1)
        for omega in learner.method.importance.values():
            assert omega.min() >= 0
            assert omega.max() == pytest.approx(1)

    def test_a_stronger_pull_moves_less(self, small, tiny) -> None:
        def way(strength: float) -> float:
            net = tiny.shared_copy(unshared=list(tiny.weights()))
            learner, _ = method_checks.lived(
                small(method="mas", options={"strength": strength}), net, 1
            )
            anchor = dict(learner.method.anchor)  # the next session moves it
            settings = small(method="mas")
            learner.learn(build_scenario(settings, net.preprocess).session(1))
            now = learner.student.backbone.weights()
            return sum(float((now[n] - anchor[n]).detach().abs().sum()) for n in anchor)

        assert way(1000.0) < way(0.0)


def test_tent_moves_the_image_towers_norms_and_makes_it_surer(small, tiny) -> None:
    settings = small(method="zero-shot", adapt="tent", lr=1e-3)
    learner = Learner(settings.learner(), tiny)
    stream = build_scenario(settings, tiny.preprocess)
    learner.learn(stream.session(1))
    before = {n: w.detach().clone() for n, w in tiny.weights().items()}
    pixels = stream.session(1).unlabelled.read(range(24))
    unsure = [learner.adapt(pixels).loss.item() for _ in range(6)]
    assert unsure[-1] < unsure[0]
    moved = {n for n, w in tiny.weights().items() if not torch.equal(w, before[n])}
    assert moved == set(tiny.image_norm_weights())
    assert len(moved) == 2 * (2 * 4 + 2)  # two in each block, one before and one after


class TestEATA:
    def test_selects_reliable_and_new_images_weighted_by_entropy(self) -> None:
        logits = tensor([[9.0, 0.0, 0.0], [0.1, 0.0, 0.0], [0.0, 9.0, 0.0]])
        limit = 0.4 * math.log(3)
        keep, weight = select_samples(logits, None, 0.4, 0.1)
        assert keep.tolist() == [True, False, True]
        sure = softmax([9.0, 0.0, 0.0])
        by_hand = math.exp(limit + sum(p * math.log(p) for p in sure))
        assert weight[0].item() == pytest.approx(by_hand, rel=1e-4)
        familiar = tensor(softmax([9.0, 0.0, 0.0]))
        assert select_samples(logits, familiar, 0.4, 0.1)[0].tolist() == [False, False, True]

    def test_fisher_is_the_mean_squared_batch_gradient_of_its_own_labels(self, small, tiny) -> None:
        settings = small(method="zero-shot", adapt="eata")
        learner = Learner(settings.learner(), tiny)
        session = build_scenario(settings, tiny.preprocess).session(0)
        learner.learn(session)
        method, name = learner.method.unlabelled, "vision_model.post_layernorm.weight"
        weight = tiny.weights()[name].requires_grad_(True)
        logits = learner.student.scaled_image_logits(session.train.read(range(len(session.train))))
        loss = torch.nn.functional.cross_entropy(logits, logits.argmax(1))
        (grad,) = torch.autograd.grad(loss, weight)
        torch.testing.assert_close(method.fisher[name], grad.square())
        assert method.penalty(learner.student).item() == 0

    def test_no_step_if_nothing_is_kept(self, small, tiny) -> None:
        settings = small(method="zero-shot", adapt="eata")
        learner = Learner(settings.learner(), tiny)
        stream = build_scenario(settings, tiny.preprocess)
        learner.learn(stream.session(0))
        learner.method.unlabelled.mean_probs = torch.full((3,), 1 / 3)  # everything is like this
        before = learner.digest()
        assert learner.adapt(stream.session(1).unlabelled.read(range(12))).loss is None
        assert learner.digest() == before
