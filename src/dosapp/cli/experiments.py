"""Commands of the researcher: runs, grids, the paper's tables, what they would cost, reports."""

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.status import Status

from dosapp.cli.console import Config, Json, SetOption, app, err, out, show
from dosapp.cli.flags import with_settings
from dosapp.errors import InputError
from dosapp.settings import RunSettings, parse_options, read_yaml

if TYPE_CHECKING:
    from dosapp.experiments.costs import Estimate
    from dosapp.experiments.run import RunCallback

Engine = Annotated[
    Literal["processes", "ray"],
    typer.Option(help="who computes: processes here, or a Ray cluster (RAY_ADDRESS)"),
]


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="where runs and report go")] = Path("demo"),
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """Six methods on five small tasks, side by side, with pictures. About three minutes."""
    from contextlib import ExitStack

    from dosapp.cli.progress import run_progress
    from dosapp.experiments.demo import demo as play

    with ExitStack() as stack:

        def watch(settings: RunSettings) -> "RunCallback":
            stack.close()
            return stack.enter_context(run_progress(settings.method, err))

        _, results = play(folder, seed, watch)
    show(results, as_json)
    if not as_json:
        out.print(f"\nwrote {folder}/report.html and its figures as PNG and SVG")


@app.command()
@with_settings(RunSettings)
def run(
    flags: dict[str, Any],
    config: Config = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="run folder; none: runs/HASH, computed once")
    ] = None,
    resume: Annotated[bool, typer.Option(help="go on with the run in --out, or start it")] = False,
    track: Annotated[
        list[str] | None,
        typer.Option(help="tensorboard, wandb or mlflow; log.jsonl is always there"),
    ] = None,
    options: SetOption = None,
    as_json: Json = False,
) -> None:
    """One experiment: a learner, a stream, a matrix of accuracies.

    In several processes: torchrun --nproc-per-node 2 -m dosapp run …
    """
    from dosapp.cli.progress import run_progress
    from dosapp.experiments.plan import load_settings, plan
    from dosapp.experiments.run import run as compute
    from dosapp.experiments.store import Store
    from dosapp.experiments.tracking import TrackingCallback
    from dosapp.runtime import distributed

    settings = load_settings(config, {**flags, "options": parse_options(options or [])})
    with distributed.process_group(settings.device):
        planned = plan(settings)
        place = folder or Store(Path("runs")).place(planned)
        with (
            distributed.rank_folder(place) as here,
            run_progress(planned.settings.method, err) as shown,
            closing(TrackingCallback(here, planned.settings, _tracks(track), shown)) as watch,
        ):
            result = compute(planned, here, resume=resume or folder is None, watch=watch)
    show([result], as_json)
    if not as_json:
        out.print(f"wrote {place}/result.json")


def _tracks(asked: list[str] | None) -> list[str]:
    """Of several processes the first keeps the ledgers."""
    from dosapp.runtime import distributed

    return (asked or []) if distributed.rank() == 0 else []


@app.command()
def grid(
    file: Annotated[Path, typer.Argument(help="YAML: settings, where lists multiply; runs; seeds")],
    folder: Annotated[Path, typer.Option("--out", help="the result store")] = Path("runs"),
    seeds: Annotated[str | None, typer.Option(help="0-4 or 0,2,5")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = 1,
    keep: Annotated[bool, typer.Option(help="keep each run's learner, not only results")] = False,
    engine: Engine = "processes",
    dry_run: Annotated[bool, typer.Option(help="print what would run")] = False,
    as_json: Json = False,
) -> None:
    """Every run a file describes, each computed once, resumable."""
    from dosapp.cli.progress import grid_progress
    from dosapp.experiments.grid import read_grid, run_grid
    from dosapp.experiments.plan import plan, run_label
    from dosapp.experiments.store import Store

    planned = read_grid(file, seeds)
    if dry_run:
        for one in planned:
            there = folder.exists() and (Store(folder).place(plan(one)) / "result.json").exists()
            print(f"{run_label(one)}, {one.data}, seed {one.seed}{', done' if there else ''}")
        return
    with grid_progress(planned, err) as watch:
        outcomes = run_grid(planned, folder, jobs=jobs, keep=keep, engine=engine, watch=watch)
    places = {one.model_dump_json(): n for n, one in enumerate(planned)}
    ordered = sorted(outcomes, key=lambda o: places[o.settings.model_dump_json()])
    finished = [o.result for o in ordered if o.result]
    if finished or as_json:
        show(finished, as_json)
    failed = [o for o in outcomes if o.result is None]
    if failed:
        raise InputError(f"{len(failed)} of {len(planned)} runs failed; first: {failed[0].error}")


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(help="a table of the paper, or all")] = None,
    scale: Annotated[str, typer.Option(help="tiny, real-small or paper")] = "tiny",
    folder: Annotated[Path, typer.Option("--out", help="the result store")] = Path("runs"),
    seeds: Annotated[str | None, typer.Option(help="0-4 or 0,2,5; none: the scale's")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="a local copy of the datasets")] = None,
    backbone: Annotated[str | None, typer.Option(help="instead of the scale's")] = None,
    references: Annotated[str | None, typer.Option(help="pictures with captions for ZSCL")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps or auto")] = None,
    skip_bad_images: Annotated[
        bool, typer.Option(help="leave out pictures that cannot be read, and count them")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = 1,
    engine: Engine = "processes",
    listed: Annotated[bool, typer.Option("--list", help="the tables there are")] = False,
    dry_run: Annotated[bool, typer.Option(help="print what would run")] = False,
    ledger: Annotated[bool, typer.Option(help="run nothing, only read what is there")] = False,
    as_json: Json = False,
) -> None:
    """Compute a table of the paper, and write its ledger."""
    from dataclasses import replace

    from dosapp.cli.progress import grid_progress
    from dosapp.experiments.costs import estimate
    from dosapp.experiments.grid import Outcome, run_grid
    from dosapp.paper.ledger import markdown, open_ledgers, write
    from dosapp.paper.reproduce import Scale, command, runs, table, tables, timed_runs

    if listed or name is None:
        for known in tables().values():
            out.print(f"[bold]{known.name}[/bold]  {known.title}", markup=True)
        return
    size = Scale.named(scale)
    given: dict[str, Any] = {"data_dir": data_dir, "backbone": backbone, "device": device}
    given["skip_bad_images"] = skip_bad_images or None
    size = replace(
        size,
        seeds=seeds or size.seeds,
        references=references or size.references,
        settings={**size.settings, **{k: v for k, v in given.items() if v is not None}},
    )
    names = list(tables()) if name == "all" else [table(name).name]
    planned = runs(names, size)
    if dry_run:
        planned += list(timed_runs(size).values()) if "time" in names else []
        for one in planned:
            print(command(one))
        left_out = (size.missing_input(row) for known in names for row in table(known).rows)
        for reason in dict.fromkeys(filter(None, left_out)):
            err.print(f"note: {reason}")
        err.print(f"{len(planned)} run(s)")
        try:
            with err.status("measuring a few steps of each kind of run"):
                err.print(_costs(estimate(planned)))
        except (
            InputError
        ) as error:  # data or backbone are elsewhere: the list is right all the same
            err.print(f"note: what they cost cannot be estimated here: {error}")
        return
    failed: list[Outcome] = []
    if not ledger:
        with grid_progress(planned, err) as watch:
            outcomes = run_grid(planned, folder, jobs=jobs, engine=engine, watch=watch)
        failed = [o for o in outcomes if o.result is None]
    found = open_ledgers(names, size, folder, not ledger)
    for ledger_table in found:
        ledger_table.draw(folder / f"{ledger_table.table.name}-{scale}")
        for reason in dict.fromkeys([*ledger_table.reasons, *ledger_table.unread]):
            err.print(f"note: {reason}")
    print(
        json.dumps([ledger_table.facts() for ledger_table in found]) if as_json else markdown(found)
    )
    if failed:
        raise InputError(f"{len(failed)} of {len(planned)} runs failed; first: {failed[0].error}")
    place = folder / f"ledger-{scale}{'' if name == 'all' else '-' + name}"
    write(found, place)
    if not as_json:
        out.print(f"wrote {place}.md and .json")


def _costs(cost: "Estimate") -> str:
    hours, memory = cost.seconds / 3600, f", {cost.memory:.0f} MB each" if cost.memory else ""
    time = f"{hours:.1f} hours" if hours >= 0.1 else f"{cost.seconds:.0f} seconds"
    return f"{cost.runs} run(s), about {time} one after the other{memory}"


@app.command()
@with_settings(RunSettings)
def estimate(
    flags: dict[str, Any],
    config: Config = None,
    gpu: Annotated[
        str | None, typer.Option(help="a GPU that is not here, by name, instead of this machine")
    ] = None,
    options: SetOption = None,
    as_json: Json = False,
) -> None:
    """Time and memory that a run, or a grid, would take."""
    from dosapp.experiments.costs import USED, gpus
    from dosapp.experiments.costs import estimate as predict
    from dosapp.experiments.grid import read_grid
    from dosapp.experiments.plan import load_settings

    many = config is not None and bool({"runs", "seeds"} & set(read_yaml(config)))
    if many and (flags or options):
        raise InputError(f"'{config}' describes many runs; flags cannot change them here")
    chosen = {**flags, "options": parse_options(options or [])}
    planned = read_grid(config) if many and config else [load_settings(config, chosen)]
    with err.status("measuring a few steps of each kind of run"):
        cost = predict(planned, gpu)
    assumed = None if gpu is None else {"gpu": gpu, **gpus()[gpu], "used": USED}
    if as_json:
        print(json.dumps({**vars(cost), "assumed": assumed}))
        return
    out.print(_costs(cost))
    if gpu is None:
        out.print("from a few steps on this machine as it is now", style="dim")
        return
    peak, share = gpus()[gpu], USED
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
    file: Annotated[Path, typer.Option("--out", help="YAML to write, or to add to")] = Path(
        "rates.yaml"
    ),
    options: SetOption = None,
    as_json: Json = False,
) -> None:
    """Choose learning rates on the first task's lessons alone."""
    from dosapp.experiments.plan import load_settings
    from dosapp.experiments.tune import RATES, TunedRates
    from dosapp.experiments.tune import tune as choose

    try:
        wanted = [float(r) for r in rates.split(",")] if rates else RATES
    except ValueError as error:
        raise InputError(f"rates are '{rates}'; write them as 1e-4,3e-4") from error
    found = TunedRates.read(file)
    for method in methods.split(","):
        settings = load_settings(
            None, {**flags, "method": method, "options": parse_options(options or [])}
        )
        with err.status(f"tuning {method}") as status:

            def watch(method: str, lr: float, seed: int, status: Status = status) -> None:
                status.update(f"tuning {method}: {lr:g}, seed {seed}")

            tuned = choose(settings, rates=wanted, seeds=tries, watch=watch)
        found.add(tuned)
        if not as_json:
            out.print(f"{method}: {tuned.lr:g}   {tuned.seen()['accuracy']}")
    found.write(file, " ".join(["dosapp", *sys.argv[1:]]))
    if as_json:
        print(json.dumps({"rates": found.rates, "seen": found.seen}))
    else:
        out.print(f"wrote {file}")


@app.command()
def report(
    places: Annotated[list[Path], typer.Argument(help="run folders, or folders of runs")],
    folder: Annotated[Path, typer.Option("--out", help="where to write")] = Path("report"),
    title: str = "DoSAPP: a comparison",
    against: Annotated[
        str | None, typer.Option(help="a row to subtract from the others, seed by seed")
    ] = None,
    costs: Annotated[bool, typer.Option(help="seconds and peak memory in the table")] = False,
    grid_file: Annotated[
        Path | None, typer.Option("--grid", help="only the rows of this grid file, in its order")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tables, figures and a page from results.

    report.md, .csv, .tex, .html, and each figure as PNG, SVG and PDF.
    """
    from dosapp.experiments.grid import select_results
    from dosapp.experiments.store import read_results
    from dosapp.report import write_report
    from dosapp.report.tables import COLUMNS, WITH_COSTS

    found = read_results(places)
    if grid_file is not None:
        found = select_results(grid_file, found)
    write_report(found, folder, title, against, WITH_COSTS if costs else COLUMNS)
    show(found, as_json, costs, against)
    if not as_json:
        out.print(f"wrote {folder}/report.html, .md, .csv, .tex and figures")
