"""Many runs from one file: lists multiply, the store knows what is done, processes share the rest.

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
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from dosapp.backbones.registry import resolve_lr
from dosapp.errors import DosappError, InputError
from dosapp.experiments.plan import plan
from dosapp.experiments.ray_cluster import RETRIES, run_on_ray
from dosapp.experiments.result import Result
from dosapp.experiments.run import run
from dosapp.experiments.store import Store
from dosapp.experiments.tracking import TrackingCallback
from dosapp.runtime.files import write_bytes
from dosapp.settings import RunSettings, hash_key, read_options, read_yaml

Engine = Literal["processes", "ray"]


@dataclass(frozen=True)
class Outcome:
    settings: RunSettings
    result: Result | None
    error: str = ""


def read_grid(path: Path, seeds: str | None = None) -> list[RunSettings]:
    """Every run a grid file asks for, each once."""
    values = read_yaml(path)
    runs = values.pop("runs", [{}])
    asked = values.pop("seeds", None)
    seeds = seeds or asked
    numbers = {"seed": seed_list(str(seeds))} if seeds is not None else {}
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise InputError(f"'runs' in '{path}' must be a list of settings; see dosapp grid --help")
    planned = [
        RunSettings.parse(one, f"'{path}'")
        for run in runs
        for one in product({**values, **run, **numbers})
    ]
    planned.sort(key=lambda one: one.seed)  # a whole table early, then more seeds of it
    return list({one.model_dump_json(): one for one in planned}.values())


def select_results(path: Path, results: list[Result]) -> list[Result]:
    """Those of the results that a grid file asks for, of any seed, in its order."""
    asked = [_name(resolve_lr(one).model_dump(mode="json")) for one in read_grid(path)]
    place = {name: n for n, name in reversed(list(enumerate(asked)))}
    found = [r for r in results if _name(r.settings) in place]
    if not found:
        raise InputError(f"no result here is of a run that '{path}' describes; compute it first")
    return sorted(found, key=lambda r: place[_name(r.settings)])


def _name(settings: Mapping[str, Any]) -> str:
    """What tells rows apart."""
    known = {**RunSettings().model_dump(mode="json"), **settings}
    return json.dumps([v for k, v in sorted(known.items()) if k != "seed"])


def product(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Lists become one choice each; `options` may hold lists too."""
    given = read_options(values)
    options = list(product(given)) if given else None
    choices = {k: v if isinstance(v, list) else [v] for k, v in values.items() if k != "options"}
    if options:
        choices["options"] = options
    for chosen in itertools.product(*choices.values()):
        yield dict(zip(choices, chosen, strict=True))


def seed_list(text: str) -> list[int]:
    """`0-4` or `0,2,5`."""
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
    engine: Engine = "processes",
    watch: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Compute what is missing. A failed run keeps its log and does not stop the others."""
    if engine == "ray":
        ended = run_on_ray(compute_run, planned, folder, keep, jobs)
    elif jobs == 1:
        ended = ((one, compute_run(one, folder, keep)) for one in planned)
    else:
        ended = _run_in_processes(planned, folder, keep, jobs)
    done = []
    for settings, found in ended:
        done.append(_checked(settings, found, folder))
        watch(done[-1])
    return done


def _checked(settings: RunSettings, found: Outcome | BaseException, folder: Path) -> Outcome:
    """What came back, unless nothing did or the result went somewhere else."""
    if isinstance(found, BaseException):  # its process is gone, its checkpoint is not
        why = str(found).strip().rpartition("\n")[2]
        return Outcome(settings, None, f"a process died ({why}); run the grid again")
    if found.result and not (folder / found.result.key / "result.json").exists():
        said = f"its result is not in '{folder}'; --out must be a folder every node can see"
        return Outcome(settings, None, said)
    return found


def _run_in_processes(
    planned: list[RunSettings], folder: Path, keep: bool, jobs: int
) -> Iterator[tuple[RunSettings, Outcome | BaseException]]:
    """As many hands as jobs. One that dies takes only its run along, and that goes on in another
    from its last checkpoint; when the grid is left, all are let go at once."""
    waiting = deque((one, 0) for one in planned)
    free, busy = [Worker() for _ in planned[:jobs]], dict[Worker, tuple[RunSettings, int]]()
    try:
        while waiting or busy:
            while waiting and free:
                hand, (one, deaths) = free.pop(), waiting.popleft()
                hand.pipe.send((one, folder, keep))
                busy[hand] = (one, deaths)
            ready = wait([hand.pipe for hand in busy])
            for hand in [hand for hand in busy if hand.pipe in ready]:
                one, deaths = busy.pop(hand)
                found = hand.found()
                died = isinstance(found, BaseException)
                free.append(Worker() if died else hand)
                if died and deaths < RETRIES:
                    waiting.appendleft((one, deaths + 1))
                else:
                    yield one, found
    finally:
        for hand in [*free, *busy]:
            hand.process.terminate()


class Worker:
    """A process that computes one run at a time."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()  # so that the pipe ends when the process does

    def found(self) -> Outcome | BaseException:
        try:
            outcome: Outcome = self.pipe.recv()
            return outcome
        except (EOFError, OSError):
            self.process.join()
            return RuntimeError(f"exit code {self.process.exitcode}")


def _work(pipe: Connection, parent: int) -> None:
    """One thread, since processes share the cores; and no hand outlives the grid it works for."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the grid hears Ctrl-C, and ends its hands
    torch.set_num_threads(1)
    warnings.formatwarning = lambda message, *_: f"note: {message}\n"

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)  # the run's last checkpoint is on disk

    threading.Thread(target=watch, daemon=True).start()
    while True:
        pipe.send(compute_run(*pipe.recv()))


def compute_run(settings: RunSettings, folder: Path, keep: bool) -> Outcome:
    """One run in the store; its learner is dropped when the result is there, unless kept."""
    # A run that cannot even be planned has no place of its own; its log has.
    place = folder / f"unplanned-{hash_key(settings.model_dump(mode='json'))}"
    try:
        planned = plan(settings)
        place = Store(folder).place(planned)
        fresh = not (place / "result.json").exists()
        with closing(TrackingCallback(place, planned.settings)) as watch:
            result = run(planned, place, resume=True, wait=True, watch=watch)
        if fresh and not keep:
            shutil.rmtree(place / "learner", ignore_errors=True)
        return Outcome(settings, result)
    except Exception as error:
        ours = isinstance(error, DosappError)
        if place.exists() or not ours:  # a user's mistake before there is a run needs no log
            write_bytes(place / "error.log", traceback.format_exc().encode())
        said = str(error) if ours else f"{type(error).__name__}: {error} (log: {place}/error.log)"
        return Outcome(settings, None, said)
