"""The cache of confident features: what enters, what leaves, and what it says."""

import math

import torch

from dosapp.heads.feature_cache import FeatureCache


def make(*entries, capacity=2, classes=3) -> FeatureCache:
    """A cache after these (feature, label, entropy), one after the other."""
    cache = FeatureCache(capacity)
    for feature, label, entropy in entries:
        values = torch.eye(classes)[[label]]
        labels, entropies = torch.tensor([label]), torch.tensor([entropy])
        cache.add(torch.tensor([[feature, 0.0]]), labels, entropies, values)
    return cache


ENTRIES = [(1.0, 0, 0.5), (2.0, 0, 0.4), (3.0, 1, 0.9), (4.0, 0, 0.3), (5.0, 0, 0.6), (6.0, 0, 0.3)]


def test_the_lowest_entropies_of_each_class_stay() -> None:
    cache = make(*ENTRIES)
    assert cache.features[:, 0].tolist() == [4.0, 6.0, 3.0]  # of equal ones the older is first
    assert cache.labels.tolist() == [0, 0, 1]


def test_one_batch_is_the_same_as_one_image_after_the_other() -> None:
    cache = FeatureCache(2)
    features = torch.tensor([[f, 0.0] for f, _, _ in ENTRIES])
    labels = torch.tensor([label for _, label, _ in ENTRIES])
    entropies = torch.tensor([e for _, _, e in ENTRIES])
    cache.add(features, labels, entropies, torch.eye(3)[labels])
    one_by_one = make(*ENTRIES).state_dict()
    assert all(torch.equal(t, one_by_one[name]) for name, t in cache.state_dict().items())


def test_its_say_falls_with_the_distance() -> None:
    cache = make((1.0, 0, 0.1), (0.5, 2, 0.1))
    image = torch.tensor([[0.8, 0.6]])
    expected = [math.exp(-5 * (1 - 0.8)), 0.0, math.exp(-5 * (1 - 0.4)), 0.0]
    torch.testing.assert_close(cache.weigh(image, 5.0, 4), torch.tensor([expected]))
    assert FeatureCache(3).weigh(image, 5.0, 4).tolist() == [[0.0] * 4]


def test_a_removed_class_leaves_with_its_features() -> None:
    cache = make((1.0, 0, 0.1), (2.0, 1, 0.1), (3.0, 2, 0.1))
    cache.remove_class(1)
    assert cache.labels.tolist() == [0, 1]
    assert cache.values.tolist() == [[True, False], [False, True]]
    cache.clear()
    assert len(cache) == 0
