"""Orders of a stream: every image once, and as few classes at a time as they promise."""

import numpy as np
import pytest

from dosapp.data.stream_order import dirichlet, few_classes, parse_class_range, shuffled
from dosapp.errors import InputError

LABELS = np.repeat(np.arange(30), 20)


@pytest.mark.parametrize("order", [few_classes(1, 4, 16), few_classes(5, 25, 64), dirichlet(0.1)])
def test_every_image_comes_once(order) -> None:
    rows = order(LABELS, 30, np.random.default_rng(0))
    assert sorted(rows) == list(range(len(LABELS)))
    again = order(LABELS, 30, np.random.default_rng(0))
    assert np.array_equal(rows, again)


@pytest.mark.parametrize(("low", "high"), [(1, 4), (5, 25)])
def test_batches_have_few_classes_until_these_run_out(low, high) -> None:
    order = few_classes(low, high, 16)(LABELS, 30, np.random.default_rng(1))
    counts = [len(set(LABELS[order[i : i + 16]])) for i in range(0, len(order), 16)]
    assert max(counts[:5]) <= high  # no class has run out yet
    assert min(counts[:5]) >= min(low, 4)


def test_a_smaller_concentration_is_more_correlated() -> None:
    rng = np.random.default_rng(0)
    orders = [shuffled, dirichlet(100.0), dirichlet(0.1), dirichlet(0.01)]
    concurrent = []  # classes in a window of 20 images
    for order in orders:
        rows = order(LABELS, 30, rng)
        concurrent.append(
            np.mean([len(set(LABELS[rows[i : i + 20]])) for i in range(0, len(rows), 20)])
        )
    assert concurrent[0] == pytest.approx(concurrent[1], abs=1.5)
    assert concurrent[1] > 1.5 * concurrent[2] > 1.5 * concurrent[3]


def test_an_empty_stream_stays_empty() -> None:
    empty, rng = np.zeros(0, dtype=np.int64), np.random.default_rng(0)
    for order in (few_classes(1, 4, 16), dirichlet(0.1)):
        assert len(order(empty, 30, rng)) == 0


@pytest.mark.parametrize("text", ["0-4", "4-1", "few", "1-", "-3", ""])
def test_a_range_that_cannot_be_read(text) -> None:
    with pytest.raises(InputError, match=f"classes_per_batch is '{text}'; write a number"):
        parse_class_range(text)
