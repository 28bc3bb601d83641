"""Storage calls that fail: the n-th call of `os` in runtime/files.py raises."""

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from dosapp.runtime import files

CALLS = {"open", "read", "write", "fsync", "replace", "unlink", "makedirs", "listdir", "lstat",
         "stat", "fstat"}  # fmt: skip
Mode = Literal["before", "after", "gone"]


class FaultyOS:
    """Stands for the module `os` in runtime/files.py.

    Args:
        fail_at: The number of the call that fails, from 1.
        mode: It fails before it has an effect, after it, or with all calls that follow.
        code: The error's number.
    """

    def __init__(self, fail_at: int, mode: Mode, code: int) -> None:
        self.fail_at, self.mode, self.code = fail_at, mode, code
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        if name not in CALLS:
            return function

        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            fails = (
                self.calls >= self.fail_at if self.mode == "gone" else self.calls == self.fail_at
            )
            if not fails:
                return function(*args, **options)
            if self.mode == "after" and name != "open":  # its descriptor would be lost
                function(*args, **options)
            elif name == "write":
                function(args[0], args[1][: len(args[1]) // 2])
            raise OSError(self.code, os.strerror(self.code))

        return call


@contextlib.contextmanager
def failing_call(number: int, mode: Mode = "before", code: int = errno.EIO) -> Iterator[FaultyOS]:
    """Let one storage call fail inside the context."""
    faulty = FaultyOS(number, mode, code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "os", faulty)
        yield faulty
