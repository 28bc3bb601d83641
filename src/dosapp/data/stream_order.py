"""Orders in which a session's unlabelled images arrive: labels → rows, every order once.

The labels only decide the order of the images; no learner sees them.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from dosapp.data.base import Rows
from dosapp.errors import InputError

# (labels [N], number of classes, generator) → rows of the stream, in order
StreamOrder = Callable[[Rows, int, np.random.Generator], Rows]


def shuffled(labels: Rows, classes: int, rng: np.random.Generator) -> Rows:
    """Independent images, as in the paper."""
    return rng.permutation(len(labels))


def correlated(labels: Rows, classes: int, rng: np.random.Generator) -> Rows:
    """Class by class, in a random order of classes."""
    order, rank = rng.permutation(len(labels)), rng.permutation(classes)
    return order[np.argsort(rank[labels[order]], kind="stable")]


def one_class(labels: Rows, classes: int, rng: np.random.Generator) -> Rows:
    """A single class, drawn with replacement, as many images as before."""
    order = rng.permutation(len(labels))
    if not len(labels):
        return order
    return rng.choice(np.flatnonzero(labels == rng.choice(np.unique(labels))), size=len(labels))


def few_classes(low: int, high: int, batch_size: int) -> StreamOrder:
    """Batches of `low` to `high` classes; more only when these run out of images.

    Example:
        >>> labels = np.repeat(np.arange(10), 8)
        >>> order = few_classes(1, 2, 8)(labels, 10, np.random.default_rng(0))
        >>> len(set(labels[order[:8]])) <= 2 and sorted(order) == list(range(80))
        True
    """
    return partial(_few_classes, low=low, high=high, batch_size=batch_size)


def _few_classes(
    labels: Rows,
    classes: int,
    rng: np.random.Generator,
    *,
    low: int,
    high: int,
    batch_size: int,
) -> Rows:
    shuffled_rows = rng.permutation(len(labels))
    left = {c: shuffled_rows[labels[shuffled_rows] == c] for c in np.unique(labels).tolist()}
    order: list[Rows] = []
    while left:
        candidates = rng.permutation(list(left))
        sizes = np.cumsum([len(left[c]) for c in candidates])
        enough = int(np.searchsorted(sizes, batch_size)) + 1  # classes that fill the batch
        chosen = candidates[: max(int(rng.integers(low, high + 1)), enough)]
        batch = rng.permutation(np.concatenate([left[c] for c in chosen]))[:batch_size]
        order.append(batch)
        for c in chosen:
            left[c] = left[c][~np.isin(left[c], batch)]
            if not len(left[c]):
                del left[c]
    return np.concatenate(order) if order else shuffled_rows


def dirichlet(concentration: float) -> StreamOrder:
    """Time slots with few classes each: every class spreads over them by Dirichlet shares.

    There are as many slots as classes. Small concentrations give long runs of a class, large ones
    approach a shuffled stream. NOTE and LAME evaluate on such streams.

    Example:
        >>> labels = np.repeat(np.arange(4), 5)
        >>> sorted(dirichlet(0.1)(labels, 4, np.random.default_rng(0))) == list(range(20))
        True
    """
    return partial(_dirichlet, concentration=concentration)


def _dirichlet(
    labels: Rows, classes: int, rng: np.random.Generator, *, concentration: float
) -> Rows:
    present = np.unique(labels)
    slot_of = np.empty(len(labels), dtype=np.int64)
    for label in present:
        rows = np.flatnonzero(labels == label)
        shares = rng.dirichlet(np.full(len(present), concentration))
        slot_of[rows] = rng.choice(len(present), size=len(rows), p=shares)
    order = rng.permutation(len(labels))
    return order[np.argsort(slot_of[order], kind="stable")]


def parse_class_range(text: str) -> tuple[int, int]:
    """Parse `1-4` or `3`, the number of classes in a batch of the stream.

    Example:
        >>> parse_class_range("5-25")
        (5, 25)
    """
    low, dash, high = text.partition("-")
    numbers = [low, high if dash else low]
    if not all(n.isdigit() for n in numbers) or not 1 <= int(numbers[0]) <= int(numbers[1]):
        raise InputError(f"classes_per_batch is '{text}'; write a number or a range, such as 1-4")
    return int(numbers[0]), int(numbers[1])
