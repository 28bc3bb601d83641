"""A Ray cluster, and runs sent to it: the same runs, the same folder of results.

The folder must be one that every node can see. A run whose worker dies is started again elsewhere
and goes on from its last checkpoint.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from dosapp.errors import InputError
from dosapp.settings import RunSettings

RETRIES = 3  # of a run whose worker died; a run that fails by itself is not tried again


@contextmanager
def ray_cluster(cpus: int, what: str) -> Iterator[Any]:
    """Ray, in the cluster that `RAY_ADDRESS` names; without it one is started here, as large as
    `cpus`, and ended with the block."""
    try:
        import ray
    except ImportError as error:
        raise InputError(f"{what} needs the Ray package: pip install 'dosapp[ray]'") from error
    mine = not ray.is_initialized()
    with redirect_stdout(sys.stderr):  # Ray tells of dead workers on stdout, where results go
        if mine:
            os.environ.setdefault("RAY_worker_niceness", "0")  # computing is what they are for
            usual = {"log_to_driver": False, "logging_level": "ERROR"}
            new = {"num_cpus": cpus, "include_dashboard": False}
            address = os.environ.get("RAY_ADDRESS")
            try:
                ray.init(**usual, **({} if address else new))
            except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
                why = str(error).strip().partition("\n")[0]
                raise InputError(
                    f"no Ray cluster can be used at '{address or 'this machine'}' ({why}); "
                    "set RAY_ADDRESS to one that is up, or leave it out"
                ) from error
        try:
            yield ray
        finally:
            if mine:
                ray.shutdown()


def run_on_ray(
    compute: Callable[..., Any],
    planned: Sequence[RunSettings],
    folder: Path,
    keep: bool,
    jobs: int,
) -> Iterator[tuple[RunSettings, Any]]:
    """Each run with what came of it (or the error that ended its last worker), as they end."""
    with ray_cluster(jobs, "--engine ray") as ray:
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_compute)
        home, place = os.getcwd(), folder.resolve()
        there = "GPU" in ray.cluster_resources()
        waiting = {
            task.options(num_gpus=1 if there and wants_gpu(one) else 0).remote(
                compute, home, one, place, keep
            ): one
            for one in planned
        }
        while waiting:
            for ready in ray.wait(list(waiting))[0]:
                settings = waiting.pop(ready)
                try:
                    yield settings, ray.get(ready)
                except ray.exceptions.RayError as error:
                    yield settings, error


def wants_gpu(settings: RunSettings) -> bool:
    """Ray hides the GPUs of a node from a task that did not ask for one."""
    return settings.device.startswith(("auto", "cuda"))


def _compute(
    compute: Callable[..., Any], home: str, settings: RunSettings, folder: Path, keep: bool
) -> Any:
    """In a worker: one thread, and relative paths mean what they meant to whoever asked."""
    import torch

    torch.set_num_threads(1)
    if Path(home).is_dir():
        os.chdir(home)
    return compute(settings, folder, keep)
