"""RanPAC's ridge regression, against arithmetic written out."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from dosapp.errors import InputError
from dosapp.heads.ranpac import (
    DEFAULT_RIDGE,
    RIDGES,
    RandomFeatureStatistics,
    RanPACHead,
    validation_errors,
)

RNG = torch.Generator().manual_seed(0)
FEATURES = normalize(torch.randn(40, 6, dtype=torch.float64, generator=RNG), dim=1)
LABELS = torch.arange(40) % 4
TEXTS = normalize(torch.randn(4, 6, dtype=torch.float64, generator=RNG), dim=1)


def fill(sessions=((0, 1), (2, 3))) -> RandomFeatureStatistics:
    statistics = RandomFeatureStatistics(width=12, seed=3)
    for labels in sessions:
        rows = torch.isin(LABELS, torch.tensor(labels))
        statistics.add_session(FEATURES[rows], LABELS[rows])
    return statistics


def make_head(statistics, text_weight=0.0) -> RanPACHead:
    return RanPACHead(statistics, torch.tensor(30.0, dtype=torch.float64), text_weight)


def test_scores_are_the_ridge_regression_of_one_hot_labels() -> None:
    statistics = fill()
    axes = torch.eye(6, dtype=torch.float64)
    weights = (statistics.project(axes) - statistics.project(-axes)).numpy()  # relu(w) − relu(−w)
    hidden = np.maximum(FEATURES.numpy() @ weights, 0)
    gram, targets = np.zeros((12, 12)), np.zeros((12, 4))
    for row, label in zip(hidden, LABELS, strict=True):
        gram += np.outer(row, row)
        targets[:, label] += row
    ridge = statistics.ridge
    assert ridge in RIDGES
    solved = np.linalg.inv(gram + ridge * np.eye(12)) @ targets
    scores = make_head(statistics, text_weight=0.5).score(FEATURES, TEXTS)
    expected = 30 * (hidden @ solved + 0.5 * FEATURES.numpy() @ TEXTS.numpy().T)
    assert np.allclose(scores, expected, atol=1e-6)


@pytest.mark.parametrize("width", [4, 60])  # fewer and more than the images that are fitted
def test_validation_errors_are_those_of_each_ridge(width) -> None:
    hidden = RandomFeatureStatistics(width).project(FEATURES)
    order = {label: (label == LABELS).nonzero().squeeze(1).tolist() for label in range(4)}
    held_out = sorted(row for rows in order.values() for row in rows[4::5])
    fitted = [row for row in range(40) if row not in held_out]
    h, y = hidden.numpy(), np.eye(4)[LABELS]
    for n, ridge in enumerate(RIDGES.tolist()):
        if ridge < 1e-4:  # inverting a singular matrix by hand is less exact than the code
            continue
        inverse = np.linalg.inv(h[fitted].T @ h[fitted] + ridge * np.eye(width))
        predicted = h[held_out] @ inverse @ h[fitted].T @ y[fitted]
        expected = ((predicted - y[held_out]) ** 2).sum()
        assert validation_errors(hidden, LABELS)[n].item() == pytest.approx(expected, rel=1e-5)


def test_the_ridge_has_the_smallest_error_over_all_sessions() -> None:
    statistics, parts = fill(), [fill(((0, 1),)), fill(((2, 3),))]
    total = sum(part.errors for part in parts)
    assert torch.allclose(statistics.errors, total)
    assert statistics.ridge == RIDGES[total.argmin()].item()


def test_the_order_of_sessions_does_not_matter() -> None:
    one, two = fill(((0, 1), (2, 3))), fill(((3,), (2, 0), (1,)))
    assert torch.allclose(one.gram, two.gram, atol=1e-12)
    one, two = fill(((0, 1), (2, 3))), fill(((2, 3), (0, 1)))
    scores = [make_head(statistics).score(FEATURES, TEXTS) for statistics in (one, two)]
    assert torch.allclose(*scores, atol=1e-9)


def test_few_images_cannot_choose_a_ridge() -> None:
    statistics = RandomFeatureStatistics(width=5)
    statistics.add_session(FEATURES[:4], LABELS[:4])
    assert statistics.ridge == DEFAULT_RIDGE
    scores = make_head(statistics).score(FEATURES[:4], TEXTS)
    assert scores.isfinite().all()


def test_the_random_weights_are_not_stored() -> None:
    statistics = fill()
    state = statistics.state_dict()
    assert sorted(state) == ["errors", "gram", "labels", "sums"]
    assert state["gram"].shape == (12 * 13 // 2,)
    restored = RandomFeatureStatistics(width=12, seed=3)
    restored.load_state_dict(state)
    assert torch.equal(restored.gram, restored.gram.T)
    scores = [make_head(s).score(FEATURES, TEXTS) for s in (statistics, restored)]
    assert torch.allclose(*scores, atol=1e-9)
    again = restored.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())
    restored.load_state_dict({})
    assert restored.gram is None


def test_a_removed_class_leaves_the_others_as_they_were() -> None:
    statistics = fill()
    before = make_head(statistics).score(FEATURES, TEXTS)
    statistics.remove_class(1)
    after = make_head(statistics).score(FEATURES, TEXTS[:3])
    assert torch.allclose(after, before[:, [0, 2, 3]])


def test_a_class_without_statistics_is_one_sentence() -> None:
    with pytest.raises(InputError, match="class 3 of 4 has no statistics"):
        make_head(fill(((0, 1),))).score(FEATURES, TEXTS)
