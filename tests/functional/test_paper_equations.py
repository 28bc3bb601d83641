"""The paper's equations, by number, on values that can be checked by hand."""

import math

import pytest
import torch
from torch import tensor

from dosapp.functional.ema import ema_update, momentum_tensor
from dosapp.functional.losses import clip_loss
from dosapp.functional.masks import gradient_scores, iter_gradients, merge_scores, top_fraction
from dosapp.functional.pseudo_labels import LABELLERS, max_logit_labels


class TestEquation1Scores:
    def test_is_the_absolute_mean_gradient(self) -> None:
        w = tensor([1.0, 2.0], requires_grad=True)
        xs = [tensor([1.0, -4.0]), tensor([3.0, -2.0])]
        scores = gradient_scores(iter_gradients({"w": w}, ((w * x).sum() for x in xs)))
        assert scores["w"].tolist() == [2.0, 3.0]

    def test_opposite_gradients_cancel_before_the_absolute_value(self) -> None:
        w = tensor([1.0], requires_grad=True)
        scores = gradient_scores(iter_gradients({"w": w}, (w.sum() * sign for sign in (5.0, -5.0))))
        assert scores["w"].tolist() == [0.0]

    def test_no_losses_are_an_error(self) -> None:
        with pytest.raises(ValueError, match="without losses"):
            gradient_scores([])


class TestTopFraction:
    def test_selects_the_largest_of_each_tensor(self) -> None:
        scores = {"a": tensor([[1.0, 9.0], [3.0, 2.0]]), "b": tensor([100.0, 200.0])}
        mask = top_fraction(scores, 0.5)
        assert mask["a"].tolist() == [[False, True], [True, False]]
        assert mask["b"].tolist() == [False, True]

    def test_or_the_largest_of_all_tensors(self) -> None:
        scores = {"a": tensor([1.0, 2.0]), "b": tensor([100.0, 200.0])}
        mask = top_fraction(scores, 0.5, scope="global")
        assert mask["a"].tolist() == [False, False]
        assert mask["b"].tolist() == [True, True]

    def test_selects_a_tenth_of_the_layers_of_vit_b_16(self) -> None:
        vision, text = torch.rand(3072, 768), torch.rand(2048, 512)
        mask = top_fraction({"v": vision, "t": text}, 0.1)
        assert int(mask["v"].sum()) == 235_929
        assert int(mask["t"].sum()) == 104_857

    def test_zero_scores_are_never_selected(self) -> None:
        assert int(top_fraction({"a": tensor([0.0, 0.0, 1.0, 0.0])}, 0.5)["a"].sum()) == 1


class TestUnionOfMasks:
    def test_support_is_the_union_and_m_u_lies_inside_it(self) -> None:
        generator = torch.Generator().manual_seed(0)
        best: dict = {}
        union = torch.zeros(20, 20, dtype=torch.bool)
        for _ in range(3):
            scores = {"w": torch.rand(20, 20, generator=generator)}
            mask = top_fraction(scores, 0.1)
            best = merge_scores(best, scores, mask)
            union |= mask["w"]
        assert torch.equal(best["w"] > 0, union)
        m_u = top_fraction(best, 0.1)["w"]
        assert int(m_u.sum()) == 40
        assert not (m_u & ~union).any()

    def test_after_one_task_m_u_is_its_mask(self) -> None:
        scores = {"w": torch.rand(10, 10, generator=torch.Generator().manual_seed(1))}
        mask = top_fraction(scores, 0.1)
        assert torch.equal(top_fraction(merge_scores({}, scores, mask), 0.1)["w"], mask["w"])

    @pytest.mark.parametrize(
        ("how", "expected"),
        [
            ("max", [4.0, 3.0]),
            ("sum", [6.0, 3.0]),
            ("last", [2.0, 3.0]),
            ("normalised", [1.0, 1.0]),
        ],
    )
    def test_ways_to_combine(self, how: str, expected: list[float]) -> None:
        first = merge_scores({}, {"w": tensor([4.0, 3.0])}, {"w": tensor([True, False])}, how)
        both = merge_scores(first, {"w": tensor([2.0, 3.0])}, {"w": tensor([True, True])}, how)
        assert both["w"].tolist() == expected


class TestEquations3And4EMA:
    def test_p_is_gamma_inside_delta_outside_and_q_the_rest(self) -> None:
        p = momentum_tensor(tensor([True, False]), active=0.8, frozen=0.9999)
        q = (0.9999 - 0.8) * tensor([1.0, 0.0]) + 1 - 0.9999
        assert p.tolist() == pytest.approx([0.8, 0.9999])
        assert (p + q).tolist() == pytest.approx([1.0, 1.0])

    def test_update_by_hand(self) -> None:
        teacher, student = {"w": tensor([0.0, 0.0])}, {"w": tensor([1.0, 1.0])}
        ema_update(teacher, student, {"w": tensor([True, False])}, active=0.8, frozen=0.99)
        assert teacher["w"].tolist() == pytest.approx([0.2, 0.01])

    def test_equal_momenta_are_an_ordinary_average(self) -> None:
        teacher, student = {"w": tensor([1.0, 2.0])}, {"w": tensor([3.0, 6.0])}
        ema_update(teacher, student, {"w": tensor([True, False])}, active=0.5, frozen=0.5)
        assert teacher["w"].tolist() == [2.0, 4.0]

    def test_momentum_one_does_not_change_the_teacher(self) -> None:
        teacher, student = {"w": tensor([0.1, 0.2])}, {"w": tensor([7.0, 8.0])}
        before = teacher["w"].clone()
        ema_update(teacher, student, {"w": tensor([True, False])}, active=1.0, frozen=1.0)
        assert torch.equal(teacher["w"], before)


class TestEquation5PseudoLabels:
    teacher = tensor([[0.9, 0.1], [0.2, 0.3], [0.5, 0.1]])
    student = tensor([[0.1, 0.8], [0.6, 0.1], [0.1, 0.5]])

    def test_the_larger_top_logit_labels_and_ties_go_to_the_teacher(self) -> None:
        assert max_logit_labels(self.teacher, self.student).tolist() == [0, 0, 0]
        assert max_logit_labels(self.student, self.teacher).tolist() == [0, 0, 1]

    def test_one_expert_alone(self) -> None:
        assert LABELLERS["teacher"](self.teacher, self.student).tolist() == [0, 1, 0]
        assert LABELLERS["student"](self.teacher, self.student).tolist() == [1, 0, 1]


class TestClipLoss:
    def test_equal_captions_give_log_b(self) -> None:
        images = torch.nn.functional.normalize(torch.rand(7, 4), dim=1)
        text = torch.nn.functional.normalize(torch.rand(1, 4), dim=1).expand(7, 4)
        assert clip_loss(text, text, 100.0).item() == pytest.approx(math.log(7), abs=1e-5)
        assert clip_loss(images, text, 0.0).item() == pytest.approx(math.log(7), abs=1e-5)

    def test_by_hand(self) -> None:
        eye = torch.eye(2)
        # logits [[2, 0], [0, 2]]: the loss of each row is log(e² + 1) - 2, in both directions
        assert clip_loss(eye, eye, 2.0).item() == pytest.approx(math.log(math.e**2 + 1) - 2)

    def test_a_batch_of_one_has_loss_zero(self) -> None:
        assert clip_loss(torch.rand(1, 4), torch.rand(1, 4), 37.0).item() == 0.0
