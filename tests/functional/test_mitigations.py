"""The formulas behind the mitigations: class skew and mask reactivation."""

import math

import pytest
import torch
from torch import tensor

from dosapp.functional.class_skew import class_skew
from dosapp.functional.masks import reactivate_entries


class TestClassSkew:
    def test_is_zero_for_equal_counts_and_one_for_one_class(self) -> None:
        assert class_skew(tensor([5.0, 5.0, 5.0])) == pytest.approx(0, abs=1e-6)
        assert class_skew(tensor([9.0, 0.0, 0.0])) == pytest.approx(1)
        half = 1 - math.log(2) / math.log(4)
        assert class_skew(tensor([8.0, 8.0, 0.0, 0.0])) == pytest.approx(half)

    def test_few_labels_are_no_skew(self) -> None:
        counts = torch.zeros(100)
        counts[:4] = 1
        assert class_skew(counts) == pytest.approx(0, abs=1e-6)


class TestReactivateEntries:
    mask = {"w": tensor([True] * 4 + [False] * 8)}
    scores = {"w": tensor([9.0, 8, 7, 6, 5, 4, 3, 2, 1.5, 1.2, 0, 0])}
    owner = {"w": tensor([3, 3, 3, 3, 1, 1, 1, 2, 2, 2, 0, 0]).short()}

    def active(self, turn: int, share: float = 0.5) -> list[int]:
        mask = reactivate_entries(self.mask, self.scores, self.owner, share, turn)["w"]
        return mask.nonzero().squeeze(1).tolist()

    def test_each_past_session_gets_an_equal_part_by_its_scores(self) -> None:
        assert self.active(0) == [0, 1, 4, 7]  # its own two lowest entries rest

    def test_the_next_turn_continues_where_this_one_stopped(self) -> None:
        assert self.active(1) == [0, 1, 5, 8]
        assert self.active(2) == [0, 1, 6, 9]
        assert self.active(3) == self.active(0)

    def test_the_mask_keeps_its_size_without_entries_that_were_never_selected(self) -> None:
        for turn in range(5):
            active = self.active(turn, 0.9)
            assert len(active) == 4
            assert max(active) < 10

    def test_no_share_is_no_change(self) -> None:
        assert self.active(0, 0.0) == [0, 1, 2, 3]
