"""Drift of class means: the formulas of `learner/class_head.py`, written out."""

import math

import numpy as np
import pytest
import torch

from dosapp.functional.drift import KERNEL, kernel_weights, merge_drift

torch.manual_seed(1)
OLD, BEFORE, AFTER = (torch.randn(7, 4, dtype=torch.float64) for _ in range(3))
MEANS = torch.randn(3, 4, dtype=torch.float64)


def test_weights_fall_with_the_distance_to_the_mean() -> None:
    weights = kernel_weights(OLD, MEANS)
    distances = [[math.dist(f, m) ** 2 for m in MEANS.tolist()] for f in OLD.tolist()]
    width = sorted(min(row) for row in distances)[3]  # the median of seven
    for n, c in ((0, 0), (3, 2), (6, 1)):
        expected = math.exp(-KERNEL * distances[n][c] / width)
        assert weights[n, c].item() == pytest.approx(expected)


def test_a_class_without_near_images_has_weights_all_the_same() -> None:
    far = torch.full((1, 4), 1e4, dtype=torch.float64)
    assert (kernel_weights(OLD, torch.cat([MEANS, far])).sum(dim=0) > 0).all()


def test_drift_is_advanced_and_then_averaged_with_what_the_batch_shows() -> None:
    drift, seen = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0.5, 2.0, 0.0])
    weights = kernel_weights(OLD, MEANS)
    moved, total = merge_drift(drift, seen.double(), weights, OLD, BEFORE, AFTER)
    for c in range(3):
        w = weights[:, c].numpy()
        advanced = drift[c].numpy() + (w / w.sum()) @ (AFTER - BEFORE).numpy()
        observed = (w / w.sum()) @ (AFTER - OLD).numpy()
        share = w.sum() / (w.sum() + seen[c].item())
        assert np.allclose(moved[c], (1 - share) * advanced + share * observed)
        assert total[c].item() == pytest.approx(seen[c].item() + w.sum())


def test_a_translation_of_all_features_is_found_exactly() -> None:
    """Two steps, each moving every feature by the same vector: D is their sum."""
    shift = torch.tensor([1.0, 0.0, -2.0, 0.5], dtype=torch.float64)
    drift, seen = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    weights = kernel_weights(OLD, MEANS)
    drift, seen = merge_drift(drift, seen, weights, OLD, OLD, OLD + shift)
    other = OLD.flip(0)
    weights = kernel_weights(other, MEANS)
    drift, seen = merge_drift(drift, seen, weights, other, other + shift, other + 2 * shift)
    assert torch.allclose(drift, (2 * shift).expand(3, 4))
