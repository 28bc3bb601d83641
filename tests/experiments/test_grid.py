"""Grids of runs, their workers, and tuning on the first task."""

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from torch import Tensor

from dosapp.cli.progress import grid_progress
from dosapp.data.images import InMemoryImages
from dosapp.errors import InputError
from dosapp.experiments import grid, run_folder
from dosapp.experiments.grid import (
    Outcome,
    compute_run,
    parse_seeds,
    read_grid,
    run_grid,
    select_results,
)
from dosapp.experiments.plan import load_settings, plan, resolve_training
from dosapp.experiments.result import Result
from dosapp.experiments.run import run
from dosapp.experiments.store import read_results
from dosapp.experiments.tune import (
    Trial,
    TunedRates,
    TuningResult,
    choose_rate,
    split_first_session,
    tune,
)
from dosapp.runtime.files import file_stamp, lock_folder
from dosapp.settings import RunSettings
from support.results import make_result
from support.settings import SMALL


def write(path: Path, **values: object) -> Path:
    path.write_text(yaml.safe_dump({**SMALL, **values}))
    return path


def test_seeds_may_be_a_list_as_other_settings(tmp_path) -> None:
    for seeds in ("[0, 2]", "0,2"):
        (tmp_path / "g.yaml").write_text(f"runs: [{{method: spu}}]\nseeds: {seeds}\n")
        assert [settings.seed for settings in read_grid(tmp_path / "g.yaml")] == [0, 2]


def test_lists_multiply_and_runs_add(tmp_path) -> None:
    file = write(
        tmp_path / "g.yaml",
        runs=[
            {"method": ["flyp", "spu"]},
            {"method": "dosapp", "stream": [True, False]},
            {"method": "dosapp", "options": {"sparsity": [0.1, 0.3], "gamma": 0.5}},
        ],
    )
    planned = read_grid(file, "0-1")
    assert len(planned) == 2 * (2 + 2 + 2)
    assert [one.seed for one in planned] == [0] * 6 + [1] * 6
    assert {one.options.get("sparsity") for one in planned} == {None, 0.1, 0.3}


def test_the_live_table_separates_datasets_and_names_failures(small) -> None:
    planned = [small(data="shapes"), small(data="signs"), small(data="signs", seed=1)]
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, height=30)
    with grid_progress(planned, console) as show_outcome:
        assert "DoSAPP, signs" in screen.getvalue()  # shown before it is finished
        show_outcome(Outcome(planned[0], make_result("DoSAPP", 0, 61.5, 7.25)))
        show_outcome(Outcome(planned[1], make_result("DoSAPP", 0, 41.5, 9.25)))
        show_outcome(Outcome(planned[2], None, "the disk is full"))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "DoSAPP, shapes 1/1 61.5 7.2" in lines
    assert "DoSAPP, signs 2/2 41.5 9.2 1" in lines
    assert "DoSAPP, signs: the disk is full" in lines
    assert any("3/3" in line for line in lines)


def test_two_descriptions_of_a_run_are_computed_once(tmp_path, small) -> None:
    """They have one key, and the second waits for the first."""
    planned = [small(method="spu"), small(method="spu", options={"sparsity": 0.1})]
    outcomes = run_grid(planned, tmp_path / "store", jobs=2)
    assert [o.error for o in outcomes] == ["", ""]
    one, two = (o.result for o in outcomes)
    assert (one.key, one.finished) == (two.key, two.finished)
    assert not list(tmp_path.rglob("error.log"))


@pytest.mark.parametrize("jobs", [1, 2])
def test_force_computes_stored_runs_again(tmp_path, small, jobs) -> None:
    planned = [small(method="spu", seed=seed) for seed in range(2)]
    run_grid(planned, tmp_path)
    files = sorted(tmp_path.glob("*/result.json"))
    before = [file_stamp(file) for file in files]
    run_grid(planned, tmp_path, jobs=jobs)
    assert [file_stamp(file) for file in files] == before
    outcomes = run_grid(planned, tmp_path, jobs=jobs, force=True)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    # The time too: a file system may give a new file the inode of a deleted one.
    assert not {file_stamp(file) for file in files} & set(before)
    assert sorted(tmp_path.iterdir()) == [file.parent for file in files]
    assert not list(tmp_path.glob("*/learner"))


def test_two_descriptions_of_a_forced_run_are_computed_once(tmp_path, small, monkeypatch) -> None:
    """The second waits for the first, and reads what replaced the stored run."""
    planned = [small(method="spu"), small(method="spu", options={"sparsity": 0.1})]
    run_grid(planned[:1], tmp_path)
    (folder,) = tmp_path.iterdir()
    stored, waits = Result.read(folder).finished, threading.Event()

    def lock_and_tell(path: Path, wait: bool = False) -> contextlib.AbstractContextManager:
        if wait:
            waits.set()
        return lock_folder(path, wait)

    monkeypatch.setattr(run_folder, "lock_folder", lock_and_tell)
    with ThreadPoolExecutor() as pool:
        with run_folder.compute_again(plan(planned[0]), folder) as again:
            second = pool.submit(compute_run, planned[1], tmp_path, keep=False, force=True)
            assert waits.wait(60)
            first = run(planned[0], again)
        outcome = second.result()
    assert outcome.error == ""
    assert outcome.result.finished == first.finished != stored
    assert list(tmp_path.iterdir()) == [folder]


def test_options_that_are_not_names_and_values_are_one_sentence(tmp_path) -> None:
    file = write(tmp_path / "g.yaml", options=["a"])
    for read in (read_grid, lambda path: load_settings(path, {})):
        with pytest.raises(InputError, match="write them as name: value"):
            read(file)


def test_rates_are_not_added_to_a_file_of_something_else(tmp_path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("# dosapp tune\nrates: {spu: 0.1}\nseen: {}\n")
    assert TunedRates.read(file) == TunedRates({"spu": 0.1}, {}, ["# dosapp tune"])
    file.write_text("method: spu\n")
    with pytest.raises(InputError, match="has 'method', so it is no file of rates"):
        TunedRates.read(file)


def test_seeds() -> None:
    assert parse_seeds("0-4") == [0, 1, 2, 3, 4]
    assert parse_seeds("0,2,5") == [0, 2, 5]
    with pytest.raises(InputError, match="seeds are 'x'"):
        parse_seeds("x")
    with pytest.raises(InputError, match="which is none"):
        parse_seeds("4-0")


def test_a_failed_run_does_not_stop_the_others(tmp_path, small) -> None:
    planned = [small(data="shaps"), small(method="zero-shot")]
    outcomes = run_grid(planned, tmp_path / "store")
    assert "did you mean 'shapes'" in outcomes[0].error
    assert outcomes[1].result is not None
    assert not list(tmp_path.rglob("learner"))  # results are kept, learners are not


def test_a_failed_run_keeps_its_log(tmp_path, small) -> None:
    [outcome] = run_grid([small(method="flyp", lr=1e12)], tmp_path / "store")
    assert outcome.result is None
    [log] = tmp_path.rglob("error.log")
    assert outcome.error in log.read_text()


def test_a_run_that_cannot_be_planned_keeps_its_log_too(tmp_path, small, monkeypatch) -> None:
    def fails(settings: RunSettings) -> None:
        raise RuntimeError("no plan")

    monkeypatch.setattr("dosapp.experiments.grid.plan", fails)
    [outcome] = run_grid([small()], tmp_path)
    [log] = tmp_path.rglob("error.log")
    assert f"(log: {log})" in outcome.error
    assert "no plan" in log.read_text()


def test_processes_give_the_same_results(tmp_path, small) -> None:
    planned = [small(method="zero-shot"), small(method="spu")]
    alone = {o.settings.method: o.result for o in run_grid(planned, tmp_path / "a")}
    together = {o.settings.method: o.result for o in run_grid(planned, tmp_path / "b", jobs=2)}
    for method, result in alone.items():
        assert together[method].weights == result.weights


@contextlib.contextmanager
def long_grid(folder: Path) -> Iterator[tuple[subprocess.Popen, list[int]]]:
    """A grid of ten long runs in two processes, once both compute; and their ids."""
    file = write(folder / "g.yaml", method="flyp", seeds="0-9", epochs=200)
    # A process that is started in the background ignores Ctrl-C, and so would its children.
    handle = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{handle}; from dosapp.cli import main; main()"]
    command += ["grid", str(file), "--jobs", "2"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(list(folder.rglob("run.json"))) == 2)
        workers = children(process.pid)
        assert workers
        yield process, workers
    finally:
        process.kill()
        process.wait()


def test_workers_do_not_outlive_a_killed_grid(tmp_path) -> None:
    with long_grid(tmp_path) as (_, workers):
        pass
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


def test_the_run_of_a_killed_worker_is_resumed_by_another(tmp_path) -> None:
    file = write(tmp_path / "g.yaml", method="spu", seeds="0-2", epochs=15, batch_size=4)
    undisturbed = run_grid(read_grid(file), tmp_path / "undisturbed")
    command = [sys.executable, "-m", "dosapp", "grid", str(file), "--jobs", "2"]
    process = subprocess.Popen(
        [*command, "--out", "store", "--json"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: bool(list((tmp_path / "store").rglob("working.safetensors"))))
        [worker, *_] = filter(None, map(holder, (tmp_path / "store").glob("*/.lock")))
        os.kill(worker, signal.SIGKILL)
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0
    found = {one["settings"]["seed"]: one["weights"] for one in json.loads(output)}
    assert found == {o.settings.seed: o.result.weights for o in undisturbed}


def test_a_worker_that_died_while_idle_is_replaced(tmp_path, small, monkeypatch) -> None:
    """Killed before its first run: sending to it failed and ended the grid as an error of the
    disk."""
    workers = []

    class FirstKilled(grid.Worker):
        def __init__(self) -> None:
            super().__init__()
            workers.append(self)
            if len(workers) == 1:
                self.process.kill()
                self.process.join()

    monkeypatch.setattr(grid, "Worker", FirstKilled)
    outcomes = run_grid([small(method="zero-shot", seed=n) for n in (0, 1)], tmp_path, jobs=2)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert len(workers) == 3


def test_results_of_another_device_or_data_folder_are_selected(tmp_path, small) -> None:
    """Settings that do not enter a key, and names of version 0.1, were taken for another run."""
    settings = small(method="zero-shot")
    run_grid([settings], tmp_path / "store")
    [result] = read_results([tmp_path / "store"])
    other = {**result.settings, "device": "cuda", "data_dir": "/data", "microbatch": 8}
    other["batch"] = other.pop("batch_size", other.get("batch"))
    elsewhere = result.model_copy(update={"settings": other})
    foreign = result.model_copy(update={"settings": {**other, "epochs": 99}})
    file = write(tmp_path / "g.yaml", method="zero-shot")
    assert select_results(file, [elsewhere, foreign, result]) == [elsewhere, result]
    with pytest.raises(InputError, match="no result here is of a run"):
        select_results(file, [foreign])


def test_results_of_other_seeds_are_selected_only_if_they_are_named(tmp_path, small) -> None:
    """A study with more seeds in the same store entered the tables of every grid."""
    run_grid([small(method="zero-shot")], tmp_path / "store")
    [result] = read_results([tmp_path / "store"])
    other = result.model_copy(update={"settings": {**result.settings, "seed": 3}})
    file = write(tmp_path / "g.yaml", method="zero-shot", seeds="0-2")
    assert select_results(file, [other, result]) == [result]
    assert select_results(file, [other, result], "0-3") == [other, result]


def test_ctrl_c_ends_a_grid_at_once(tmp_path) -> None:
    with long_grid(tmp_path) as (process, workers):
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) != 0
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    assert len(list(tmp_path.rglob("run.json"))) == 2  # no other run was started


def wait_for(condition: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def children(parent: int) -> list[int]:
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in found]


def test_unknown_keys_are_errors(tmp_path) -> None:
    with pytest.raises(InputError, match="did you mean 'epochs'"):
        read_grid(write(tmp_path / "g.yaml", epoch=3))


class TestTuning:
    def test_the_smallest_rate_that_cannot_be_told_from_the_best(self) -> None:
        tried = [
            Trial.from_counts(1e-5, 150, 240),
            Trial.from_counts(1e-4, 237, 240),
            Trial.from_counts(1e-3, 238, 240),
        ]
        assert choose_rate(tried) == 1e-4

    def test_scores_only_held_out_training_images_of_task_1(self, small) -> None:
        teach, held = split_first_session(small(train_images=10))
        assert len(teach.classes) == 3
        assert (len(teach.train), len(held)) == (24, 6)
        assert not set(teach.train.keys()) & set(held.keys())
        assert all("/train/" in key for key in [*teach.train.keys(), *held.keys()])
        assert len(teach.unlabelled) == 0

    @pytest.mark.parametrize("trials", [None, 2], ids=["grid", "optuna"])
    def test_never_reads_the_test_set(self, trials, small, monkeypatch) -> None:
        read = InMemoryImages.read

        def read_training_images(images: InMemoryImages, rows: object) -> Tensor:
            assert "/test" not in images.key(0)
            return read(images, rows)

        monkeypatch.setattr(InMemoryImages, "read", read_training_images)
        settings = small(method="spu", train_images=10)
        with pytest.raises(AssertionError):
            plan(settings).scenario.tasks[0].test.read([0])
        tuned = tune(settings, rates=[1e-4, 1e-3], seeds=1, trials=trials)
        assert 1e-4 <= tuned.lr <= 1e-3
        assert len(tuned.trials) == 2
        assert tuned.images == {"teach": 24, "score": 6}

    def test_what_cannot_be_tuned_is_refused(self, small) -> None:
        with pytest.raises(InputError, match="the first task has one class"):
            tune(small(tasks=6))
        with pytest.raises(InputError, match="'zero-shot' never trains"):
            tune(small(method="zero-shot"))
        equal = [Trial(1e-4, 100.0, 5.1), Trial(1e-3, 100.0, 5.1)]
        with pytest.raises(InputError, match=r"every rate has 100.0 % on 6 held-out images"):
            TuningResult("spu", 1e-4, equal, {"score": 6}).check()

    def test_rates_of_another_backbone_are_kept_apart(self, tmp_path) -> None:
        tuned = TuningResult("spu", 1e-4, [Trial(1e-4, 90.0, 1.0)], {"score": 6})
        rates = TunedRates({"spu": 0.1}, {"spu": {}})
        rates.add(tuned, "lit-s14")
        rates.write(tmp_path / "rates.yaml", "dosapp tune")
        again = TunedRates.read(tmp_path / "rates.yaml")
        assert again.rates == {"spu": 0.1}
        assert again.backbones["lit-s14"]["rates"] == {"spu": 1e-4}

    def test_shipped_rates_are_used_for_the_tiny_backbone_only(self) -> None:
        assert resolve_training(RunSettings(method="spu")).lr > 1e-5
        assert resolve_training(RunSettings(method="spu", lr=0.5)).lr == 0.5
        assert resolve_training(RunSettings(method="spu", backbone="ViT-B-16")).lr == 7.5e-6
        for backbone in ("tiny", "ViT-B-16"):  # as on data of one's own
            own = RunSettings(method="spu", backbone=backbone, data="cub", auto_lr=True)
            assert resolve_training(own).lr is None


class TestRay:
    def test_a_killed_worker_is_replaced_and_loses_nothing(self, tmp_path) -> None:
        """The run goes on from its checkpoint, and ends where an undisturbed one ends."""
        pytest.importorskip("ray")
        long = {"method": "spu", "epochs": 30, "batch_size": 4}
        file = write(tmp_path / "g.yaml", runs=[long])
        planned = read_grid(file)
        [undisturbed] = run_grid(planned, tmp_path / "undisturbed", jobs=2)
        command = [sys.executable, "-m", "dosapp", "grid", str(file), "--engine", "ray"]
        process = subprocess.Popen(
            [*command, "--out", "store", "--json"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_for(lambda: bool(list((tmp_path / "store").rglob("working.safetensors"))))
            [lock] = (tmp_path / "store").glob("*/.lock")
            worker = holder(lock)
            assert worker != process.pid
            os.kill(worker, signal.SIGKILL)
            output, errors = process.communicate(timeout=300)
        finally:
            process.kill()
        assert process.returncode == 0, errors
        [found] = json.loads(output)
        assert found["weights"] == undisturbed.result.weights
        assert steps(lock.parent) < 1.5 * steps(tmp_path / "undisturbed" / undisturbed.result.key)
        assert holder(lock) is None

    @pytest.mark.slow
    def test_the_cluster_page_on_two_nodes_of_which_one_dies(self, tmp_path) -> None:
        """The run of the dead node goes on at the other one."""
        pytest.importorskip("ray")
        page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
        command = next(line for line in page.splitlines() if line.startswith("dosapp grid "))
        _, file, *options = shlex.split(command, comments=True)[1:]
        long = {"method": "spu", "epochs": 60, "batch_size": 4}
        planned = read_grid(write(tmp_path / file, runs=[long], seeds="0-1"))
        undisturbed = run_grid(planned, tmp_path / "undisturbed", jobs=2)
        with two_nodes() as (address, second_node):
            process = subprocess.Popen(
                [sys.executable, "-m", "dosapp", "grid", file, *options, "--json"],
                cwd=tmp_path,
                env={**os.environ, "RAY_ADDRESS": address},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

            def has_checkpoint(run: Path) -> object:
                worker = holder(run / ".lock")
                checkpoint = run / "learner" / "working.safetensors"
                return worker and parent(worker) == second_node and checkpoint.exists()

            try:
                wait_for(lambda: any(map(has_checkpoint, (tmp_path / "results").glob("*"))))
                os.kill(second_node, signal.SIGKILL)
                output, errors = process.communicate(timeout=300)
            finally:
                process.kill()
        assert process.returncode == 0, errors
        weights = {o.settings.seed: o.result.weights for o in undisturbed if o.result}
        assert {r["settings"]["seed"]: r["weights"] for r in json.loads(output)} == weights

    def test_without_the_package_or_a_cluster_it_is_a_sentence(
        self, tmp_path, small, monkeypatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(InputError, match=r"pip install -e '\.\[ray\]'"):
            run_grid([small()], tmp_path, engine="ray")
        monkeypatch.undo()
        pytest.importorskip("ray")
        monkeypatch.setenv("RAY_ADDRESS", "auto")
        with pytest.raises(InputError, match="no Ray cluster can be used at 'auto'"):
            run_grid([small()], tmp_path, engine="ray")


def steps(run: Path) -> int:
    """Logged, repeated ones included."""
    return len((run / "log.jsonl").read_text().splitlines())


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[str, int]]:
    """A Ray cluster of two nodes with a core each: its address, the process of the second node."""
    program = """if True:
        from ray.cluster_utils import Cluster
        size = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
        cluster = Cluster(True, head_node_args={**size, "include_dashboard": False})
        node = cluster.add_node(**size)
        print("nodes", cluster.address, node.all_processes["raylet"][0].process.pid, flush=True)
        input()
        cluster.shutdown()
    """
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "RAY_worker_niceness": "0"},
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        line = next(line for line in process.stdout if line.startswith("nodes"))
        _, address, second_node = line.split()
        try:
            yield address, int(second_node)
        finally:
            process.stdin.write("\n")


def parent(process: int) -> int | None:
    """Its parent; None if it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return None
    return int(re.findall(r"PPid:\s+(\d+)", status)[0])


def holder(file: Path) -> int | None:
    """The process that has this file open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if link.readlink() == file:
                return int(link.parts[2])
        except OSError:  # gone since, or not ours
            continue
    return None
