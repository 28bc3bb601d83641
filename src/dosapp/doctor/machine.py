"""The machine: torch and its devices, a broken torchvision, threads, disk and caches."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from dosapp.data.cache import cache_folder, list_cache, size_limit
from dosapp.doctor import Finding
from dosapp.runtime.devices import available_devices
from dosapp.runtime.plural import plural

MIN_FREE_GB = 1.0
IMPORT_SECONDS = 120  # a cold import on a slow disk


def check_machine() -> list[Finding]:
    """All checks of the machine."""
    return [check_torch(), check_torchvision(), check_threads(), check_disk(), check_cache()]


def check_torch() -> Finding:
    """The build of torch and the devices it can use."""
    devices = available_devices()
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if shutil.which("nvidia-smi") and "cuda" not in devices:
        return Finding(
            "torch",
            "problem",
            f"torch {torch.__version__} ({build}) cannot use the GPU of this machine; install a "
            "CUDA build that fits its driver",
            {"version": torch.__version__, "devices": devices},
        )
    message = f"{torch.__version__} ({build}), Python {platform.python_version()}; devices: "
    facts = {"version": torch.__version__, "build": build, "devices": devices}
    return Finding("torch", "ok", message + ", ".join(devices), facts)


def check_torchvision() -> Finding:
    """Whether an installed torchvision imports; transformers fails with one that does not."""
    if importlib.util.find_spec("torchvision") is None:
        return Finding("torchvision", "ok", "not installed, and not needed")
    process = subprocess.run(  # not here: half an import would stay in this process
        [sys.executable, "-c", "import torchvision; print(torchvision.__version__)"],
        capture_output=True,
        text=True,
        check=False,
        timeout=IMPORT_SECONDS,
    )
    if process.returncode == 0:
        return Finding("torchvision", "ok", process.stdout.strip())
    reason = (process.stderr.strip().splitlines() or ["no message"])[-1][:120]
    return Finding(
        "torchvision",
        "problem",
        f"it does not import ({reason}), which can break transformers; 'pip uninstall "
        "torchvision', or install the one for your torch",
    )


def check_threads() -> Finding:
    """Threads of torch and the cores this process may use."""
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    facts = {"threads": threads, "cores": cores}
    if threads > cores:
        return Finding(
            "threads",
            "problem",
            f"torch uses {threads} threads on {cores} cores, which is slow; set "
            f"OMP_NUM_THREADS={cores}",
            facts,
        )
    return Finding("threads", "ok", f"{threads} on {cores} cores", facts)


def check_disk() -> Finding:
    """Free space where runs and caches are written."""
    places = {"here": Path.cwd(), "cache": _existing(cache_folder())}
    free = {name: shutil.disk_usage(path).free / 1e9 for name, path in places.items()}
    text = ", ".join(f"{gigabytes:.1f} GB free {name}" for name, gigabytes in free.items())
    text = text.replace("free cache", "free for the cache")
    if min(free.values()) < MIN_FREE_GB:
        return Finding(
            "disk", "problem", f"{text}; a run needs more than {MIN_FREE_GB:.0f} GB", dict(free)
        )
    return Finding("disk", "ok", text, dict(free))


def check_cache() -> Finding:
    """Size of the cache of decoded images, and its limit."""
    entries = list_cache()
    used, limit = sum(entry.bytes for entry in entries) / 1e9, size_limit() / 1e9
    text = f"{used:.2f} of {limit:g} GB in {plural(len(entries), 'file')}, {cache_folder()}"
    facts = {"gigabytes": used, "limit": limit, "files": len(entries)}
    return Finding("cache", "ok", text, facts)


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
