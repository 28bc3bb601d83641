"""How much memory this process has held at most since a moment, on Linux."""

from contextlib import suppress
from pathlib import Path

PROCESS = Path("/proc/self")


def forget_peak() -> None:
    """Start counting from what is held now."""
    with suppress(OSError):  # elsewhere, or not allowed: the peak is then of the whole process
        (PROCESS / "clear_refs").write_text("5")


def peak() -> float | None:
    """In MB, or None where the system does not say."""
    try:
        lines = (PROCESS / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), None)
