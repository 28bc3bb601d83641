"""Commands for experiments: runs, grids, tables of the paper, cost estimates, reports."""

import json
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.status import Status

from dosapp.cli.completion import complete_table, complete_tracker
from dosapp.cli.console import Config, Json, SetOption, app, err, out, print_results
from dosapp.cli.flags import ResumeLatest, with_settings
from dosapp.errors import DosappError, InputError
from dosapp.runtime.plural import plural
from dosapp.settings import RunSettings, parse_options, read_yaml

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dosapp.experiments.callbacks import RunCallback
    from dosapp.experiments.costs import Estimate
    from dosapp.experiments.grid import Outcome
    from dosapp.paper.reproduce import Scale

Engine = Annotated[
    Literal["processes", "ray"],
    typer.Option(help="processes on this machine, or a Ray cluster (RAY_ADDRESS)"),
]


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="folder of runs and report")] = Path("demo"),
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """Compare seven methods on five small tasks, with figures. About three minutes."""
    from contextlib import ExitStack

    from dosapp.cli.progress import run_progress
    from dosapp.experiments.demo import run_demo
    from dosapp.report import write_report
    from dosapp.runtime.extras import check_extra

    check_extra("the report of the demo", "report")
    with ExitStack() as stack:

        def show_progress(settings: RunSettings) -> "RunCallback":
            stack.close()
            return stack.enter_context(run_progress(settings.method, err))

        results = run_demo(folder, seed, show_progress)
    write_report(results, folder, "DoSAPP: seven methods after five tasks")
    print_results(results, as_json)
    if not as_json:
        out.print(f"\nwrote {folder}/report.html and its figures as PNG and SVG")


@app.command(cls=ResumeLatest)
@with_settings(RunSettings)
def run(
    flags: dict[str, Any],
    config: Config = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="run folder [runs/KEY, computed once]")
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="continue the run in --out, or start it; also --resume latest")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="compute it again if it is stored")
    ] = False,
    preset: Annotated[
        str | None, typer.Option(help="a reading of the paper: paper-text or paper-likely")
    ] = None,
    track: Annotated[
        list[str] | None,
        typer.Option(
            "--track",
            "--report-to",
            help="tensorboard, wandb, mlflow, all or none; log.jsonl is always written",
            autocompletion=complete_tracker,
        ),
    ] = None,
    options: SetOption = None,
    as_json: Json = False,
) -> None:
    """Train and evaluate one method on one scenario.

    In several processes: torchrun --nproc-per-node 2 -m dosapp run …
    """
    from dosapp.cli.progress import run_progress
    from dosapp.experiments.plan import load_settings, plan
    from dosapp.experiments.run import run as compute
    from dosapp.experiments.run_folder import check_run_folder, compute_again
    from dosapp.experiments.store import Store
    from dosapp.experiments.tracking import TrackingCallback, parse_trackers
    from dosapp.runtime import distributed
    from dosapp.runtime.devices import resolve_device

    settings = load_settings(config, {**flags, "options": parse_options(options or [])}, preset)
    trackers = parse_trackers(track or [])
    resolve_device(settings.device)
    if folder is not None and not force:
        check_run_folder(folder, resume)
    with distributed.process_group(settings.device):
        planned = plan(settings)
        run_folder = folder or Store(Path("runs")).run_folder(planned)
        is_stored = not force and (run_folder / "result.json").exists()
        replaces = force and run_folder.exists()
        with (
            compute_again(planned, run_folder) if replaces else nullcontext() as again,
            distributed.rank_folder(again or run_folder) as own_folder,
            run_progress(planned.settings.method, err) as progress,
            closing(
                TrackingCallback(
                    own_folder,
                    planned.settings,
                    trackers if distributed.rank() == 0 else [],
                    progress,
                )
            ) as callback,
        ):
            resume = resume or folder is None or force
            try:
                result = compute(planned, own_folder, resume=resume, callback=callback)
            except KeyboardInterrupt:
                err.print(progress.describe_position())
                raise
    print_results([result], as_json)
    if not as_json and is_stored:
        out.print(f"read {run_folder}/result.json: stored, not computed; --force computes it again")
    elif not as_json:
        out.print(f"wrote {run_folder}/result.json")


@app.command()
def grid(
    file: Annotated[Path, typer.Argument(help="YAML: settings, where lists multiply; runs; seeds")],
    folder: Annotated[Path, typer.Option("--out", help="the result store")] = Path("runs"),
    seeds: Annotated[str | None, typer.Option(help="0-4 or 0,2,5")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = 1,
    keep: Annotated[bool, typer.Option(help="keep learners, not only results")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="compute stored runs again, and replace them")
    ] = False,
    engine: Engine = "processes",
    dry_run: Annotated[bool, typer.Option(help="print what would run")] = False,
    as_json: Json = False,
) -> None:
    """Compute the runs of a grid file, each once; it can be resumed."""
    from dosapp.cli.progress import grid_progress
    from dosapp.experiments.grid import read_grid, run_grid
    from dosapp.experiments.identity import run_label
    from dosapp.experiments.store import Store
    from dosapp.runtime.devices import resolve_device

    planned = read_grid(file, seeds)
    if dry_run:
        for s in planned:
            done = ", done" if Store(folder).has_result(s) else ""
            print(f"{run_label(s)}, {s.data}, seed {s.seed}{done}")
        return
    if engine == "processes":  # a cluster has other devices
        for device in {s.device for s in planned}:
            resolve_device(device)
    with grid_progress(planned, err) as show_outcome:
        outcomes = run_grid(
            planned,
            folder,
            jobs=jobs,
            keep=keep,
            force=force,
            engine=engine,
            on_outcome=show_outcome,
        )
    position = {settings.model_dump_json(): n for n, settings in enumerate(planned)}
    outcomes.sort(key=lambda outcome: position[outcome.settings.model_dump_json()])
    finished = [outcome.result for outcome in outcomes if outcome.result]
    if finished or as_json:
        print_results(finished, as_json)
    check_failures(outcomes)


def check_failures(outcomes: "Sequence[Outcome]") -> None:
    failed = [outcome for outcome in outcomes if outcome.result is None]
    if failed:
        count = f"{len(failed)} of {len(outcomes)}"
        raise DosappError(f"{count} runs failed; first: {failed[0].error}")


@app.command()
def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(help="a table of the paper, or all", autocompletion=complete_table),
    ] = None,
    scale: Annotated[str, typer.Option(help="tiny, hard, real-small or paper")] = "tiny",
    folder: Annotated[Path, typer.Option("--out", help="the result store")] = Path("runs"),
    seeds: Annotated[str | None, typer.Option(help="0-4 or 0,2,5 [the scale's]")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="a local copy of the datasets")] = None,
    backbone: Annotated[str | None, typer.Option(help="instead of the scale's")] = None,
    references: Annotated[str | None, typer.Option(help="images with captions for ZSCL")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps or auto")] = None,
    skip_bad_images: Annotated[
        bool, typer.Option(help="skip unreadable images, and count them")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = 1,
    engine: Engine = "processes",
    listed: Annotated[bool, typer.Option("--list", help="list the tables")] = False,
    dry_run: Annotated[bool, typer.Option(help="print what would run")] = False,
    with_costs: Annotated[
        bool, typer.Option("--estimate", help="with --dry-run: measure what it would cost")
    ] = False,
    ledger: Annotated[bool, typer.Option(help="run nothing, only read stored results")] = False,
    as_json: Json = False,
) -> None:
    """Compute a table of the paper, and write its ledger."""
    from dataclasses import replace

    from dosapp.cli.progress import grid_progress
    from dosapp.experiments.grid import Outcome, run_grid
    from dosapp.paper.ledger import format_ledgers, read_ledgers, write_ledgers
    from dosapp.paper.reproduce import Scale, get_table, list_runs, load_tables

    if listed or name is None:
        for table in load_tables().values():
            out.print(f"[bold]{table.name}[/bold]  {table.title}", markup=True)
        return
    size = Scale.from_name(scale)
    given: dict[str, Any] = {"data_dir": data_dir, "backbone": backbone, "device": device}
    given["skip_bad_images"] = skip_bad_images or None
    size = replace(
        size,
        seeds=seeds or size.seeds,
        references=references or size.references,
        settings={**size.settings, **{k: v for k, v in given.items() if v is not None}},
    )
    names = list(load_tables()) if name == "all" else [get_table(name).name]
    if dry_run:
        _print_dry_run(names, size, folder, with_costs)
        return
    planned = list_runs(names, size)
    outcomes: list[Outcome] = []
    if not ledger:
        with grid_progress(planned, err) as show_outcome:
            outcomes = run_grid(planned, folder, jobs=jobs, engine=engine, on_outcome=show_outcome)
    ledgers = read_ledgers(names, size, folder, not ledger)
    for table_ledger in ledgers:
        table_ledger.draw_figure(folder / f"{table_ledger.table.name}-{scale}")
        for note in dict.fromkeys([*table_ledger.notes, *table_ledger.unavailable]):
            err.print(f"note: {note}")
    if as_json:
        print(json.dumps([table_ledger.to_dict() for table_ledger in ledgers]))
    else:
        print(format_ledgers(ledgers))
    check_failures(outcomes)
    path = folder / f"ledger-{scale}{'' if name == 'all' else '-' + name}"
    write_ledgers(ledgers, path)
    if not as_json:
        out.print(f"wrote {path}.md and .json")


def _print_dry_run(names: list[str], scale: "Scale", folder: Path, with_costs: bool) -> None:
    """Print the command of each run, which ones are done, and what the others would cost."""
    from dosapp.experiments.costs import estimate
    from dosapp.paper.reproduce import check_stored, format_command, get_table

    checked = check_stored(names, scale, folder)
    for settings, is_stored in checked:
        print(format_command(settings) + ("  # done" if is_stored else ""))
    rows = (row for name in names for row in get_table(name).rows)
    for reason in dict.fromkeys(filter(None, map(scale.missing_input, rows))):
        err.print(f"note: {reason}")
    missing = [settings for settings, is_stored in checked if not is_stored]
    err.print(f"{plural(len(checked), 'run')}, {len(checked) - len(missing)} done")
    if missing and not with_costs:
        err.print("--estimate measures what the others would cost")
    elif missing:
        try:
            with err.status("measuring a few steps of each kind of run"):
                err.print(_costs(estimate(missing)))
        except DosappError as error:  # data or backbone is missing; the list is still correct
            err.print(f"note: the costs cannot be estimated here: {error}")


def _costs(cost: "Estimate") -> str:
    hours, memory = cost.seconds / 3600, f", {cost.memory:.0f} MB each" if cost.memory else ""
    time = f"{hours:.1f} hours" if hours >= 0.1 else f"{cost.seconds:.0f} seconds"
    return f"{plural(cost.runs, 'run')}, about {time} one after the other{memory}"


@app.command()
@with_settings(RunSettings)
def estimate(
    flags: dict[str, Any],
    config: Config = None,
    gpu: Annotated[str | None, typer.Option(help="name of a GPU, instead of this machine")] = None,
    options: SetOption = None,
    as_json: Json = False,
) -> None:
    """Estimate the time and memory of a run or a grid."""
    from dosapp.experiments.costs import UTILIZATION, load_gpus
    from dosapp.experiments.costs import estimate as predict
    from dosapp.experiments.grid import read_grid
    from dosapp.experiments.plan import load_settings

    is_grid = config is not None and bool({"runs", "seeds"} & set(read_yaml(config)))
    if is_grid and (flags or options):
        raise InputError(f"'{config}' describes many runs; flags cannot change them here")
    values = {**flags, "options": parse_options(options or [])}
    planned = read_grid(config) if is_grid and config else [load_settings(config, values)]
    with err.status("measuring a few steps of each kind of run"):
        cost = predict(planned, gpu)
    assumed = None if gpu is None else {"gpu": gpu, **load_gpus()[gpu], "used": UTILIZATION}
    if as_json:
        print(json.dumps({**vars(cost), "assumed": assumed}))
        return
    out.print(_costs(cost))
    if gpu is None:
        out.print("measured on this machine with a few steps of each kind", style="dim")
        return
    peak, share = load_gpus()[gpu], UTILIZATION
    out.print(
        f"on {gpu}: {share['compute']:.0%} of {peak['float32']:g} TFLOP/s (half precision "
        f"{peak['half']:g}) or {share['bandwidth']:.0%} of {peak['bandwidth']:g} GB/s, whichever "
        f"takes longer; it has {peak['memory']:g} GB. Not measured.",
        style="dim",
        highlight=False,
    )


@app.command()
@with_settings(RunSettings, without=("method", "adapt", "lr", "seed"))
def tune(
    flags: dict[str, Any],
    methods: Annotated[str, typer.Option(help="comma-separated")] = "flyp,spu,dosapp,joint",
    rates: Annotated[
        str | None, typer.Option(help="learning rates to try, comma-separated")
    ] = None,
    tries: Annotated[int, typer.Option(min=1, help="seeds per rate")] = 3,
    search: Annotated[
        Literal["grid", "optuna"], typer.Option(help="try --rates, or search between them")
    ] = "grid",
    trials: Annotated[
        int | None, typer.Option(min=1, help="rates that Optuna proposes [12]")
    ] = None,
    file: Annotated[Path, typer.Option("--out", help="YAML to write, or to add to")] = Path(
        "rates.yaml"
    ),
    options: SetOption = None,
    as_json: Json = False,
) -> None:
    """Choose learning rates on the training images of the first task."""
    from dosapp.experiments.plan import load_settings
    from dosapp.experiments.tune import RATES, TunedRates
    from dosapp.experiments.tune import tune as choose
    from dosapp.runtime.extras import check_extra

    try:
        candidates = [float(r) for r in rates.split(",")] if rates else RATES
    except ValueError as error:
        raise InputError(f"rates are '{rates}'; write them as 1e-4,3e-4") from error
    if search == "optuna":
        check_extra("a search with Optuna", "optuna")
        if min(candidates) <= 0 or len(set(candidates)) < 2:
            raise InputError(f"rates are '{rates}'; Optuna needs two ends above 0, as 1e-5,1e-2")
        trials = trials or 12
    elif trials is not None:
        raise InputError(f"--trials is {trials}, which only --search optuna uses; add it")
    tuned_rates = TunedRates.read(file)
    for method in methods.split(","):
        settings = load_settings(
            None, {**flags, "method": method, "options": parse_options(options or [])}
        )
        with err.status(f"tuning {method}") as status:

            def show_trial(method: str, lr: float, seed: int, status: Status = status) -> None:
                status.update(f"tuning {method}: {lr:g}, seed {seed}")

            tuned = choose(
                settings, rates=candidates, seeds=tries, trials=trials, on_trial=show_trial
            )
        tuned.check()
        tuned_rates.add(tuned, settings.backbone)
        if not as_json:
            out.print(tuned.explain())
            for rate, accuracy in tuned.evidence()["accuracy"].items():
                out.print(f"    {rate}: {accuracy} %", style="dim")
    tuned_rates.write(file, " ".join(["dosapp", *sys.argv[1:]]))
    if as_json:
        print(json.dumps(tuned_rates.to_dict()))
    else:
        out.print(f"wrote {file}; give the chosen rate to run, new or grid as --lr")


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(help="run folders, or folders of runs")],
    folder: Annotated[Path, typer.Option("--out", help="where to write")] = Path("report"),
    title: str = "DoSAPP: a comparison",
    against: Annotated[
        str | None, typer.Option(help="a row to subtract from the others, seed by seed")
    ] = None,
    costs: Annotated[bool, typer.Option(help="add seconds and peak memory to the table")] = False,
    grid_file: Annotated[
        Path | None, typer.Option("--grid", help="only the runs of this grid file, in its order")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="instead of the grid's: 0-4 or 0,2,5")] = None,
    as_json: Json = False,
) -> None:
    """Write tables, figures and a page from results.

    report.md, .csv, .tex, .html, and each figure as PNG, SVG and PDF.
    """
    from dosapp.experiments.grid import select_results
    from dosapp.experiments.store import read_results
    from dosapp.report import write_report
    from dosapp.report.tables import COLUMNS, WITH_COSTS
    from dosapp.runtime.extras import check_extra

    check_extra("a report with figures", "report")
    if seeds is not None and grid_file is None:
        raise InputError("--seeds replaces the seeds of a grid file; give --grid as well")
    results = read_results(paths)
    if grid_file is not None:
        results = select_results(grid_file, results, seeds)
    write_report(results, folder, title, against, WITH_COSTS if costs else COLUMNS)
    print_results(results, as_json, costs, against)
    if not as_json:
        out.print(f"wrote {folder}/report.html, .md, .csv, .tex and figures")
