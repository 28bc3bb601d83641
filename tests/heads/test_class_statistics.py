"""Class statistics and the heads made of them, against arithmetic written out."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from dosapp.errors import InputError
from dosapp.heads.class_statistics import ClassStatistics
from dosapp.heads.gaussian import GaussianHead, NearestMeanHead

torch.manual_seed(0)
FEATURES = normalize(torch.randn(40, 6, dtype=torch.float64), dim=1)
LABELS = torch.arange(40) % 3
TEXTS = normalize(torch.randn(3, 6, dtype=torch.float64), dim=1)


def fill(order=(0, 1, 2)) -> ClassStatistics:
    statistics = ClassStatistics()
    for label in order:
        statistics.add(label, FEATURES[label == LABELS])
    return statistics


def test_mean_and_scatter_are_those_of_all_features() -> None:
    statistics, scatter = fill(), np.zeros((6, 6))
    for label in range(3):
        part = FEATURES[label == LABELS].numpy()
        assert np.allclose(statistics.means[label], part.mean(axis=0))
        for row in part - part.mean(axis=0):
            scatter += np.outer(row, row)
    assert np.allclose(statistics.scatter, scatter)


def test_the_order_of_sessions_does_not_matter() -> None:
    one, two = fill((0, 1, 2)), fill((2, 0, 1))
    assert torch.allclose(one.scatter, two.scatter, atol=1e-12)
    for head in (lambda s: NearestMeanHead(s, torch.tensor(30.0)), lambda s: GaussianHead(s, 0)):
        scores = [head(s).score(FEATURES, TEXTS) for s in (one, two)]
        assert torch.allclose(*scores, atol=1e-9)


def test_a_class_in_two_parts_is_the_class_at_once() -> None:
    parts, rows = fill((1, 2)), FEATURES[LABELS == 0]
    parts.add(0, rows[:5])
    parts.add(0, rows[5:])
    assert parts.counts == {1: 13, 2: 13, 0: 14}
    assert torch.allclose(parts.means[0], rows.mean(dim=0))
    assert torch.allclose(parts.scatter, fill().scatter, atol=1e-12)


def test_nearest_mean_is_the_cosine_with_the_normalised_mean() -> None:
    scores = NearestMeanHead(fill(), torch.tensor(30.0, dtype=torch.float64)).score(FEATURES, TEXTS)
    for n, label in ((0, 1), (7, 2)):
        mean = FEATURES[label == LABELS].numpy().mean(axis=0)
        expected = 30 * FEATURES[n].numpy() @ mean / np.linalg.norm(mean)
        assert scores[n, label].item() == pytest.approx(expected)


def test_gda_is_the_log_likelihood_with_a_shared_covariance_beside_the_captions() -> None:
    statistics = fill()
    scatter, count = statistics.scatter.numpy(), 40
    covariance = scatter / (count - 1)
    inverse = (count - 1) * np.linalg.inv(scatter + np.trace(covariance) * np.eye(6))
    scores = GaussianHead(statistics, torch.tensor(5.0)).score(FEATURES, TEXTS)
    image = FEATURES[3].numpy()
    for label in range(3):
        mean = FEATURES[label == LABELS].numpy().mean(axis=0)
        expected = image @ inverse @ mean - mean @ inverse @ mean / 2
        expected += 5 * image @ TEXTS[label].numpy()
        assert scores[3, label].item() == pytest.approx(expected)


def test_a_temperature_divides_the_logits() -> None:
    heads = (GaussianHead(fill(), torch.tensor(5.0), temperature=t) for t in (1.0, 4.0))
    sure, unsure = (head.score(FEATURES, TEXTS) for head in heads)
    assert torch.allclose(sure, 4 * unsure)


def test_the_scores_follow_the_statistics() -> None:
    statistics = fill()
    head = GaussianHead(statistics, torch.tensor(0.0))
    first = head.score(FEATURES, TEXTS)
    statistics.add(0, FEATURES[:4] + 1.0)
    assert not torch.equal(head.score(FEATURES, TEXTS), first)


def test_removing_a_class_moves_the_others_up() -> None:
    statistics = fill()
    last = statistics.means[2]
    statistics.remove_class(1)
    assert list(statistics.means) == [0, 1]
    assert statistics.means[1] is last
    assert NearestMeanHead(statistics, torch.tensor(1.0)).score(FEATURES, TEXTS[:2]).shape[1] == 2


def test_a_class_without_statistics_is_one_sentence() -> None:
    head = GaussianHead(fill((0, 1)), torch.tensor(0.0))
    with pytest.raises(InputError, match="class 3 of 3 has no statistics, because no image of it"):
        head.score(FEATURES, TEXTS)


def test_state_dicts_restore_everything() -> None:
    statistics = fill()
    restored = ClassStatistics()
    restored.load_state_dict(statistics.state_dict())
    assert restored.counts == statistics.counts
    assert all(torch.equal(restored.means[n], statistics.means[n]) for n in range(3))
    assert torch.equal(restored.scatter, statistics.scatter)
    restored.load_state_dict({})
    assert (restored.counts, restored.scatter) == ({}, None)
