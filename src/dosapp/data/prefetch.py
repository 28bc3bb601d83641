"""Read the next batch in a thread while the current one is being used."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def prefetch(keys: Iterable[Key], read: Callable[[Key], Value]) -> Iterator[tuple[Key, Value]]:
    """Read a value for each key, one ahead of its use.

    Args:
        keys: What to read, in order.
        read: Reads the value of a key; called in a thread. Its error is raised at the key's turn.

    Returns:
        Keys with their values, in order.

    Example:
        >>> list(prefetch([1, 2], lambda n: n * n))
        [(1, 1), (2, 4)]
    """
    pending: deque[tuple[Key, Future[Value]]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
        for key in keys:
            pending.append((key, pool.submit(read, key)))
            if len(pending) > 1:
                first, value = pending.popleft()
                yield first, value.result()
        for first, value in pending:
            yield first, value.result()
