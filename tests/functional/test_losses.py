"""Losses of the methods, against arithmetic written out here."""

import math

import pytest
from torch import tensor

from dosapp.functional.losses import distillation_loss, entropy, relation_distillation_loss
from support.formulas import softmax


class TestDistillationLoss:
    old, new = tensor([[2.0, 0.0]]), tensor([[0.0, 0.0]])

    def test_is_kl_of_the_old_from_the_new_softened_and_summed(self) -> None:
        p, q = softmax([2 / 5, 0]), [0.5, 0.5]
        by_hand = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        assert distillation_loss(self.new, self.old, 5.0).item() == pytest.approx(by_hand, rel=1e-4)
        twice = distillation_loss(self.new.repeat(2, 1), self.old.repeat(2, 1), 5.0)
        assert twice.item() == pytest.approx(2 * by_hand, rel=1e-4)

    def test_is_not_symmetric(self) -> None:
        forward = distillation_loss(self.new, self.old, 1.0)
        backward = distillation_loss(self.old, self.new, 1.0)
        assert forward.item() != pytest.approx(backward.item(), rel=1e-2)

    def test_is_zero_for_equal_logits(self) -> None:
        assert distillation_loss(self.old, self.old, 5.0).item() == pytest.approx(0, abs=1e-6)


def test_relation_distillation_compares_the_softmax_over_images_of_each_caption() -> None:
    old, new = tensor([[1.0, 0.0], [0.0, 3.0]]), tensor([[2.0, 0.0], [0.0, 0.0]])
    total = 0.0
    for caption in range(2):
        q, p = softmax(old[:, caption].tolist()), softmax(new[:, caption].tolist())
        total -= sum(a * math.log(b) for a, b in zip(q, p, strict=True))
    assert relation_distillation_loss(new, old, 1.0).item() == pytest.approx(total / 2)


def test_entropy_by_hand() -> None:
    p = softmax([1.0, 0.0])
    by_hand = -sum(a * math.log(a) for a in p)
    entropies = entropy(tensor([[1.0, 0.0], [5.0, 5.0]]))
    assert entropies.tolist() == pytest.approx([by_hand, math.log(2)])
