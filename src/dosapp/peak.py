"""How much memory a process holds, or has held at most since a moment, on Linux."""

from contextlib import suppress
from pathlib import Path

PROCESS = Path("/proc/self")


def forget_peak() -> None:
    """Start counting from what is held now."""
    with suppress(OSError):  # elsewhere, or not allowed: the peak is then of the whole process
        (PROCESS / "clear_refs").write_text("5")


def peak() -> float | None:
    """In MB, or None where the system does not say."""
    return _said("VmHWM", PROCESS)


def held(process: int) -> float | None:
    """What a process holds now, in MB."""
    return _said("VmRSS", Path("/proc") / str(process))


def _said(word: str, process: Path) -> float | None:
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(word)), None)
