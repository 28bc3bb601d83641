"""Many runs from one YAML file: lists multiply, finished runs are read from the store.

data: shapes
tasks: 10
runs:
  - method: [flyp, spu]
  - {method: dosapp, stream: [true, false]}
seeds: 0-4
"""

import itertools
import json
import os
import shutil
import signal
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from dosapp.errors import DosappError, InputError
from dosapp.experiments.identity import comparable_settings
from dosapp.experiments.plan import plan, resolve_training
from dosapp.experiments.presets import apply_preset
from dosapp.experiments.ray_cluster import RETRIES, run_on_ray
from dosapp.experiments.result import Result
from dosapp.experiments.run import run
from dosapp.experiments.run_folder import compute_again
from dosapp.experiments.store import Store
from dosapp.experiments.tracking import TrackingCallback
from dosapp.methods.registry import import_methods
from dosapp.runtime.files import write_bytes
from dosapp.settings import RunSettings, hash_key, read_options, read_yaml

Engine = Literal["processes", "ray"]


@dataclass(frozen=True)
class Outcome:
    """A run of a grid with its result, or with the error that ended it."""

    settings: RunSettings
    result: Result | None
    error: str = ""


def read_grid(path: Path, seeds: str | None = None) -> list[RunSettings]:
    """Read all runs of a grid file.

    Args:
        path: A YAML file of settings, in which lists multiply, with the optional keys `runs` (a
            list of settings that override the others), `preset` and `seeds`.
        seeds: Overrides the file's, for example `0-4`.

    Returns:
        The settings of each run once, sorted by seed.

    Raises:
        InputError: A key is unknown, a value is not allowed, or a method cannot be imported.
    """
    values = read_yaml(path)
    runs = values.pop("runs", [{}])
    seeds_in_file = values.pop("seeds", None)
    if isinstance(seeds_in_file, list):  # as other lists of the file
        seeds_in_file = ",".join(map(str, seeds_in_file))
    seeds = seeds or seeds_in_file
    numbers = {"seed": parse_seeds(str(seeds))} if seeds is not None else {}
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise InputError(f"'runs' in '{path}' must be a list of settings; see dosapp grid --help")
    values = RunSettings.rename_aliases(values)
    planned = [
        RunSettings.parse(_expand_preset(settings), f"'{path}'")
        for run in runs
        for settings in expand_lists({**values, **RunSettings.rename_aliases(run), **numbers})
    ]
    for settings in planned:
        import_methods(settings.method, settings.adapt)
    planned.sort(key=lambda settings: settings.seed)  # one seed of the whole table comes first
    return list({settings.model_dump_json(): settings for settings in planned}.values())


def _expand_preset(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without the key `preset`, with the preset beneath them."""
    rest = {name: value for name, value in settings.items() if name != "preset"}
    return apply_preset(settings["preset"], rest) if "preset" in settings else rest


def select_results(path: Path, results: list[Result], seeds: str | None = None) -> list[Result]:
    """Select the results of a grid file, in the order of the file.

    Results and runs are compared by seed and by the settings that enter a key
    (`comparable_settings`), so the device or data folder of a result does not matter.

    Args:
        path: The grid file.
        results: Those of a result store.
        seeds: Instead of the file's, as in `read_grid`.

    Raises:
        InputError: No result belongs to a run of the file.
    """
    planned = [resolve_training(s).model_dump(mode="json") for s in read_grid(path, seeds)]
    order = {row: n for n, row in reversed(list(enumerate(map(row_key, planned))))}
    runs = {(row_key(settings), settings["seed"]) for settings in planned}
    selected = [r for r in results if (row_key(r.settings), r.settings["seed"]) in runs]
    if not selected:
        raise InputError(f"no result here is of a run that '{path}' describes; compute it first")
    return sorted(selected, key=lambda result: order[row_key(result.settings)])


def row_key(settings: Mapping[str, Any]) -> str:
    """What runs of one row of a table have in common: all settings but the seed, as text."""
    return json.dumps(comparable_settings(settings), sort_keys=True)


def expand_lists(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the values that are lists; `options` may hold lists too.

    Example:
        >>> list(expand_lists({"method": ["flyp", "spu"], "tasks": 5}))
        [{'method': 'flyp', 'tasks': 5}, {'method': 'spu', 'tasks': 5}]
    """
    options = read_options(values)
    choices = {k: v if isinstance(v, list) else [v] for k, v in values.items() if k != "options"}
    if options:
        choices["options"] = list(expand_lists(options))
    for chosen in itertools.product(*choices.values()):
        yield dict(zip(choices, chosen, strict=True))


def parse_seeds(text: str) -> list[int]:
    """Parse a range or a list of seeds.

    Example:
        >>> parse_seeds("0-4"), parse_seeds("0,2,5")
        ([0, 1, 2, 3, 4], [0, 2, 5])
    """
    try:
        first, dash, last = text.partition("-")
        if dash:
            seeds = list(range(int(first), int(last) + 1))
            if not seeds:
                raise InputError(f"seeds are '{text}', which is none; write the smaller one first")
            return seeds
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"seeds are '{text}'; write 0-4 or 0,2,5") from error


def run_grid(
    planned: list[RunSettings],
    folder: Path,
    *,
    jobs: int = 1,
    keep: bool = False,
    force: bool = False,
    engine: Engine = "processes",
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Compute the runs that have no result yet; a failed run does not stop the others.

    Args:
        planned: The runs.
        folder: The result store; a failed run leaves `error.log` in its folder.
        jobs: Number of processes.
        keep: Whether learners are kept, or only results.
        force: Compute runs that have a result again; it stays until the new one is complete.
        engine: `processes` on this machine, or a `ray` cluster.
        on_outcome: Called with each outcome.

    Returns:
        The outcomes, in the order in which the runs ended.
    """
    compute = partial(compute_run, force=force)
    if engine == "ray":
        ended = run_on_ray(compute, planned, folder, keep, jobs)
    elif jobs == 1:
        ended = ((settings, compute(settings, folder, keep)) for settings in planned)
    else:
        ended = _run_in_processes(compute, planned, folder, keep, jobs)
    outcomes = []
    for settings, outcome in ended:
        outcomes.append(_check_outcome(settings, outcome, folder))
        on_outcome(outcomes[-1])
    return outcomes


def _check_outcome(
    settings: RunSettings, outcome: Outcome | BaseException, folder: Path
) -> Outcome:
    """Report a dead process, or a result that was written to another machine's folder."""
    if isinstance(outcome, BaseException):  # the checkpoint remains
        reason = str(outcome).strip().rpartition("\n")[2]
        return Outcome(settings, None, f"a process died ({reason}); run the grid again")
    if outcome.result and not (folder / outcome.result.key / "result.json").exists():
        message = f"its result is not in '{folder}'; --out must be a folder every node can see"
        return Outcome(settings, None, message)
    return outcome


def _run_in_processes(
    compute: Callable[..., Outcome], planned: list[RunSettings], folder: Path, keep: bool, jobs: int
) -> Iterator[tuple[RunSettings, Outcome | BaseException]]:
    """Distribute runs over processes. The run of a worker that dies is resumed by a new worker
    from its last checkpoint. All workers end with this generator."""
    waiting = deque((settings, 0) for settings in planned)
    free, busy = [Worker() for _ in planned[:jobs]], dict[Worker, tuple[RunSettings, int]]()
    try:
        while waiting or busy:
            while waiting and free:
                worker, (settings, deaths) = free.pop(), waiting.popleft()
                with suppress(OSError):  # it died while idle: its pipe reports that below
                    worker.pipe.send((compute, settings, folder, keep))
                busy[worker] = (settings, deaths)
            ready = wait([worker.pipe for worker in busy])
            for worker in [worker for worker in busy if worker.pipe in ready]:
                settings, deaths = busy.pop(worker)
                outcome = worker.receive()
                has_died = isinstance(outcome, BaseException)
                free.append(Worker() if has_died else worker)
                if has_died and deaths < RETRIES:
                    waiting.appendleft((settings, deaths + 1))
                else:
                    yield settings, outcome
    finally:
        for worker in [*free, *busy]:
            worker.process.terminate()


class Worker:
    """A process that computes one run at a time."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self.pipe, child_end = context.Pipe()
        self.process = context.Process(target=_work, args=(child_end, os.getpid()), daemon=True)
        self.process.start()
        child_end.close()  # so that the pipe ends when the process does

    def receive(self) -> Outcome | BaseException:
        """Wait for the outcome of the current run; an error if the process has died."""
        try:
            outcome: Outcome = self.pipe.recv()
            return outcome
        except (EOFError, OSError):
            self.process.join()
            return RuntimeError(f"exit code {self.process.exitcode}")


def _work(pipe: Connection, parent: int) -> None:
    """Compute runs in one thread, since workers share the cores, until the grid has ended."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the grid handles Ctrl-C and ends its workers
    torch.set_num_threads(1)
    warnings.formatwarning = lambda message, *_: f"note: {message}\n"

    def exit_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)  # the run's last checkpoint is on disk

    threading.Thread(target=exit_with_parent, daemon=True).start()
    while True:
        compute, *arguments = pipe.recv()
        pipe.send(compute(*arguments))


def compute_run(settings: RunSettings, folder: Path, keep: bool, force: bool = False) -> Outcome:
    """Compute one run in the store; drop its learner when the result is written, unless kept."""
    # A run that cannot be planned has no key; its log goes to a folder named by its settings.
    run_folder = folder / f"unplanned-{hash_key(settings.model_dump(mode='json'))}"
    try:
        planned = plan(settings)
        run_folder = Store(folder).run_folder(planned)
        is_stored = (run_folder / "result.json").exists()
        replaces = force and is_stored
        with compute_again(planned, run_folder, wait=True) if replaces else nullcontext() as again:
            own_folder = again or run_folder
            with closing(TrackingCallback(own_folder, planned.settings)) as callback:
                result = run(planned, own_folder, resume=True, wait=True, callback=callback)
        if (again or not is_stored) and not keep:
            shutil.rmtree(run_folder / "learner", ignore_errors=True)
        return Outcome(settings, result)
    except Exception as error:
        is_expected = isinstance(error, DosappError)
        if run_folder.exists() or not is_expected:  # wrong settings need no log
            write_bytes(run_folder / "error.log", traceback.format_exc().encode())
        log = f" (log: {run_folder}/error.log)"
        message = str(error) if is_expected else f"{type(error).__name__}: {error}{log}"
        return Outcome(settings, None, message)
