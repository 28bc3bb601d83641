"""Where and when something was computed: facts of results."""

import datetime
import platform
from pathlib import Path

import torch

from dosapp.runtime import distributed


def describe_machine(device: str) -> str:
    """Processor, threads and device, for a result."""
    description = f"{_processor_name()}, {torch.get_num_threads()} threads"
    if device == "cuda":
        description += f", {torch.cuda.get_device_name()}"
    elif device != "cpu":
        description += f", {device}"
    processes = distributed.world_size()
    return description if processes == 1 else f"{description}, {processes} processes"


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # Linux has no other source
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def timestamp() -> str:
    """The current time in UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
