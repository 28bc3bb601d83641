"""How much memory a process holds, or has held at most since a moment, on Linux; and keeping it."""

import ctypes
import gc
from contextlib import suppress
from functools import cache
from pathlib import Path

PROCESS = Path("/proc/self")


def reset_peak_memory() -> None:
    """Start counting from what is in use now: what an earlier run in this process needed, and was
    kept, is given back first."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with suppress(OSError):  # elsewhere, or not allowed: the peak is then of the whole process
        (PROCESS / "clear_refs").write_text("5")


def peak_memory() -> float | None:
    """In MB, or None where the system does not say."""
    return _said("VmHWM", PROCESS)


def resident_memory(process: int) -> float | None:
    """What a process holds now, in MB."""
    return _said("VmRSS", Path("/proc") / str(process))


def _said(word: str, process: Path) -> float | None:
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(word)), None)


@cache
def retain_freed_memory() -> None:
    """Blocks of memory that are freed stay with the process. By default glibc gives those above
    32 MB back to the kernel at once, which fills each with zeros when the next step asks for it
    again: at batch 64 of ViT-B/16 that takes longer than the forward. The price is that what was
    once needed is held. Called before threads are made it holds for them too, since then all share
    one arena, the only one that can hold large blocks. Elsewhere nothing is done."""
    trim_threshold, mmap_max, arena_max = -1, -4, -8  # M_… of malloc.h
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(arena_max, 1)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, -1)  # never
