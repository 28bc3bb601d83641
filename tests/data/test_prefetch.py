"""Reading one batch ahead in a thread."""

import threading

import pytest

from dosapp.data.prefetch import prefetch


def test_values_are_in_order_and_at_most_one_ahead() -> None:
    read: list[int] = []
    for key, value in prefetch(range(5), lambda n: read.append(n) or n * n):
        assert value == key * key
        assert max(read) <= key + 1
    assert read == [0, 1, 2, 3, 4]


def test_an_error_is_raised_at_its_turn() -> None:
    values = prefetch([2, 1, 0], lambda n: 2 // n)
    assert [next(values), next(values)] == [(2, 1), (1, 2)]
    with pytest.raises(ZeroDivisionError):
        next(values)


def test_closing_early_ends_the_thread() -> None:
    values = prefetch(range(9), lambda n: n)
    next(values)
    assert [t for t in threading.enumerate() if t.name.startswith("prefetch")]
    values.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("prefetch")]
