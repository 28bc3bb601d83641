"""Memory of a process, on Linux."""

import ctypes
import gc
from contextlib import suppress
from functools import cache
from pathlib import Path

PROCESS = Path("/proc/self")


def reset_peak_memory() -> None:
    """Start to count the peak from what is in use now; freed memory is returned first."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with suppress(OSError):  # not Linux, or not allowed: the peak is that of the whole process
        (PROCESS / "clear_refs").write_text("5")


def peak_memory() -> float | None:
    """The peak of this process in MB, or None if the system does not report it."""
    return _read_status("VmHWM", PROCESS)


def resident_memory(process: int) -> float | None:
    """The memory that a process holds now, in MB."""
    return _read_status("VmRSS", Path("/proc") / str(process))


def _read_status(field: str, process: Path) -> float | None:
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), None)


@cache
def retain_freed_memory() -> None:
    """Keep freed memory in the process instead of returning it to the kernel.

    By default glibc returns blocks above 32 MB at once, and the kernel fills them with zeros when
    the next step allocates them again: at batch 64 of ViT-B/16 that takes longer than the forward
    pass. The price is that memory once used stays allocated. Called before threads are created it
    holds for them too, because they then share one arena. On other systems nothing is done.
    """
    trim_threshold, mmap_max, arena_max = -1, -4, -8  # M_… of malloc.h
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(arena_max, 1)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, -1)  # never
