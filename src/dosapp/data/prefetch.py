"""The next batch is read while the last one is being worked on."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Key = TypeVar("Key")
Found = TypeVar("Found")


def prefetch(keys: Iterable[Key], read: Callable[[Key], Found]) -> Iterator[tuple[Key, Found]]:
    """Each key with what was read for it, in order. Never more than one is read too early, and an
    error is raised when its turn comes."""
    coming: deque[tuple[Key, Future[Found]]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as hand:
        for key in keys:
            coming.append((key, hand.submit(read, key)))
            if len(coming) > 1:
                first, found = coming.popleft()
                yield first, found.result()
        for first, found in coming:
            yield first, found.result()
