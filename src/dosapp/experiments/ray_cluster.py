"""Runs on a Ray cluster, with results in the same folder as without.

Every node must see that folder. A run whose worker dies is started again on another worker and
resumes from its last checkpoint.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from dosapp.errors import InputError
from dosapp.runtime.extras import missing_extra
from dosapp.settings import RunSettings

RETRIES = 3  # of a run whose worker died; a run that raises an error is not retried


@contextmanager
def ray_cluster(cpus: int, feature: str) -> Iterator[Any]:
    """Connect to the cluster that `RAY_ADDRESS` names, or start one for the duration of the block.

    Args:
        cpus: Size of a cluster that is started here.
        feature: What needs Ray, for the message.

    Yields:
        The `ray` module, initialized.

    Raises:
        InputError: Ray is not installed, or there is no cluster at the address.
    """
    try:
        import ray
    except ImportError as error:
        raise missing_extra(feature, "ray", error) from error
    is_owner = not ray.is_initialized()
    with redirect_stdout(sys.stderr):  # Ray reports dead workers on stdout, where results go
        if is_owner:
            os.environ.setdefault("RAY_worker_niceness", "0")  # the runs are the main work
            options = {"log_to_driver": False, "logging_level": "ERROR"}
            local = {"num_cpus": cpus, "include_dashboard": False}
            address = os.environ.get("RAY_ADDRESS")
            try:
                ray.init(**options, **({} if address else local))
            except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
                reason = str(error).strip().partition("\n")[0]
                raise InputError(
                    f"no Ray cluster can be used at '{address or 'this machine'}' ({reason}); "
                    "set RAY_ADDRESS to a running one, or leave it out"
                ) from error
        try:
            yield ray
        finally:
            if is_owner:
                ray.shutdown()


def run_on_ray(
    compute: Callable[..., Any],
    planned: Sequence[RunSettings],
    folder: Path,
    keep: bool,
    jobs: int,
) -> Iterator[tuple[RunSettings, Any]]:
    """Compute runs on a cluster.

    Args:
        compute: Computes one run, given its settings, `folder` and `keep`.
        planned: The runs.
        folder: The result store.
        keep: Whether learners are kept.
        jobs: Size of the cluster if one is started here.

    Yields:
        The settings of each run as it ends, with its outcome, or with the error of Ray if its last
        worker died.
    """
    with ray_cluster(jobs, "--engine ray") as ray:
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_compute)
        cwd, store = os.getcwd(), folder.resolve()
        has_gpu = "GPU" in ray.cluster_resources()
        waiting = {
            task.options(num_gpus=1 if has_gpu and needs_gpu(settings) else 0).remote(
                compute, cwd, settings, store, keep
            ): settings
            for settings in planned
        }
        while waiting:
            for ready in ray.wait(list(waiting))[0]:
                settings = waiting.pop(ready)
                try:
                    yield settings, ray.get(ready)
                except ray.exceptions.RayError as error:
                    yield settings, error


def needs_gpu(settings: RunSettings) -> bool:
    """Whether to request a GPU; Ray hides a node's GPUs from tasks that request none."""
    return settings.device.startswith(("auto", "cuda"))


def _compute(
    compute: Callable[..., Any], cwd: str, settings: RunSettings, folder: Path, keep: bool
) -> Any:
    """Run in a worker: one thread, and the caller's working directory for relative paths."""
    import torch

    torch.set_num_threads(1)
    if Path(cwd).is_dir():
        os.chdir(cwd)
    return compute(settings, folder, keep)
