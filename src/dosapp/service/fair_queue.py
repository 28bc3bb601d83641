"""Work of several callers, done in turn: one who sends much delays its own work only."""

import contextlib
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by caller. Callers take turns; each one's items keep their order.

    Example:
        >>> queue = FairQueue()
        >>> for caller, item in [("a", 1), ("a", 2), ("b", 3)]:
        ...     queue.put(caller, item)
        >>> [queue.pop() for _ in range(3)]
        [1, 3, 2]
    """

    def __init__(self) -> None:
        self._items: OrderedDict[str, deque[T]] = OrderedDict()  # no deque is empty

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def put(self, caller: str, item: T) -> None:
        """Add an item behind those of its caller."""
        self._items.setdefault(caller, deque()).append(item)

    def put_back(self, caller: str, item: T) -> None:
        """Add an item before those of its caller; its caller's turn comes after all others'."""
        self._items.setdefault(caller, deque()).appendleft(item)

    def pop(self) -> T:
        """Take the first item of the caller whose turn it is."""
        caller, items = self._items.popitem(last=False)
        item = items.popleft()
        if items:
            self._items[caller] = items
        return item


class FairPool:
    """Threads that work for callers in turn.

    Args:
        threads: How many.
        name: Of the threads.
        niceness: Added to that of the process: such threads get what others leave of a processor.
    """

    def __init__(self, threads: int, name: str, niceness: int = 0) -> None:
        self._queue: FairQueue[tuple[Future[Any], Callable[[], Any]]] = FairQueue()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(threads, name, _set_niceness, (niceness,))

    def submit(self, caller: str, call: Callable[[], T]) -> "Future[T]":
        """Queue a call and return its future."""
        future: Future[T] = Future()
        with self._lock:
            self._queue.put(caller, (future, call))
        self._threads.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        with self._lock:
            future, call = self._queue.pop()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

    def close(self) -> None:
        """End the threads after their current work; work that has not begun is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            while len(self._queue):
                self._queue.pop()[0].cancel()


def _set_niceness(niceness: int) -> None:
    if niceness:
        with contextlib.suppress(OSError, AttributeError):
            thread, process = threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, thread, process + niceness)
