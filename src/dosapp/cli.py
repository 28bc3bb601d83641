"""The commands. Parsing and printing only; everything heavy is imported when it is needed."""

import json
import os
import sys
import warnings
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

from dosapp.errors import BadInput, unknown
from dosapp.flags import with_settings
from dosapp.service import commands
from dosapp.settings import LearnerSettings, RunSettings, parsed, read_yaml

if TYPE_CHECKING:
    from dosapp.result import Result
    from dosapp.run import Watch
    from dosapp.timing import Estimate

app = typer.Typer(
    help="Dual-phase continual learning for CLIP: learn with labels, keep with the stream.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
out, err = Console(), Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="print JSON, for machines")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="a setting of the method, name=value; repeatable")
]
Engine = Annotated[
    Literal["processes", "ray"],
    typer.Option(help="who computes: processes here, or a Ray cluster (RAY_ADDRESS)"),
]
Config = Annotated[Path | None, typer.Argument(help="a YAML file of settings; flags win over it")]


def show(results: "list[Result]", as_json: bool, costs: bool = False) -> None:
    from dosapp.metrics import DEFINITIONS
    from dosapp.report.tables import COLUMNS, WITH_COSTS, rows

    if as_json:
        print(json.dumps([r.model_dump(mode="json") for r in results]))
        return
    table = Table(box=None, header_style="bold")
    table.add_column("method")
    columns = WITH_COSTS if costs else COLUMNS
    for name in columns.values():
        table.add_column(name, justify="right")
    for row in rows(results):
        table.add_row(row.name, *(row.text(metric) for metric in columns))
    out.print(table)
    out.print(f"F = {DEFINITIONS['forgetting']}", style="dim", highlight=False, markup=False)


# Commands


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="where runs and report go")] = Path("demo"),
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """Six methods on five small tasks, side by side, with pictures. About three minutes."""
    from contextlib import ExitStack

    from dosapp.demo import demo as play
    from dosapp.progress import progress

    with ExitStack() as stack:

        def watch(settings: RunSettings) -> "Watch":
            stack.close()
            return stack.enter_context(progress(settings.method, err))

        _, results = play(folder, seed, watch)
    show(results, as_json)
    if not as_json:
        out.print(f"\nwrote [bold]{folder}/report.html[/bold] and its figures as PNG and SVG")


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
    from dosapp import ranks
    from dosapp.plan import plan, settings_from
    from dosapp.progress import progress
    from dosapp.run import run as compute
    from dosapp.store import Store
    from dosapp.track import Tracked

    settings = settings_from(config, {**flags, "options": parsed(options or [])})
    with ranks.joined(settings.device):
        planned = plan(settings)
        place = folder or Store(Path("runs")).place(planned)
        with (
            ranks.writing(place) as here,
            progress(planned.settings.method, err) as shown,
            closing(Tracked(here, planned.settings, _tracks(track), shown)) as watch,
        ):
            result = compute(planned, here, resume=resume or folder is None, watch=watch)
    show([result], as_json)
    if not as_json:
        out.print(f"wrote {place}/result.json", highlight=False)


def _tracks(asked: list[str] | None) -> list[str]:
    """Of several processes the first keeps the books."""
    from dosapp import ranks

    return (asked or []) if ranks.rank() == 0 else []


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
    from dosapp.grid import grid as compute
    from dosapp.grid import plan
    from dosapp.plan import label
    from dosapp.progress import many

    planned = plan(file, seeds)
    if dry_run:
        for one in planned:
            print(f"{label(one)}, {one.data}, seed {one.seed}")
        return
    with many(planned, err) as watch:
        outcomes = compute(planned, folder, jobs=jobs, keep=keep, engine=engine, watch=watch)
    places = {one.model_dump_json(): n for n, one in enumerate(planned)}
    ordered = sorted(outcomes, key=lambda o: places[o.settings.model_dump_json()])
    finished = [o.result for o in ordered if o.result]
    if finished or as_json:
        show(finished, as_json)
    failed = [o for o in outcomes if o.result is None]
    if failed:
        raise BadInput(f"{len(failed)} of {len(planned)} runs failed; first: {failed[0].error}")


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(help="a table of the paper, or all")] = None,
    scale: Annotated[str, typer.Option(help="tiny, real-small or paper")] = "tiny",
    folder: Annotated[Path, typer.Option("--out", help="the result store")] = Path("runs"),
    seeds: Annotated[str | None, typer.Option(help="0-4 or 0,2,5; none: the scale's")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="a local copy of the datasets")] = None,
    backbone: Annotated[str | None, typer.Option(help="instead of the scale's")] = None,
    references: Annotated[str | None, typer.Option(help="pictures with captions for ZSCL")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = 1,
    engine: Engine = "processes",
    listed: Annotated[bool, typer.Option("--list", help="the tables there are")] = False,
    dry_run: Annotated[bool, typer.Option(help="print what would run")] = False,
    ledger: Annotated[bool, typer.Option(help="run nothing, only read what is there")] = False,
    as_json: Json = False,
) -> None:
    """A table of the paper, at a scale: compute what is missing, and write the ledger."""
    from dataclasses import replace

    from dosapp.grid import Outcome
    from dosapp.grid import grid as compute
    from dosapp.progress import many
    from dosapp.reproduce import Scale, command, opened, runs, table, tables
    from dosapp.storage import write_bytes, write_json
    from dosapp.timing import estimate

    if listed or name is None:
        for known in tables().values():
            out.print(f"[bold]{known.name}[/bold]  {known.title}", highlight=False)
        return
    size = Scale.named(scale)
    given = {"data_dir": data_dir, "backbone": backbone}
    size = replace(
        size,
        seeds=seeds or size.seeds,
        references=references or size.references,
        settings={**size.settings, **{k: v for k, v in given.items() if v is not None}},
    )
    names = list(tables()) if name == "all" else [table(name).name]
    planned = runs(names, size)
    if dry_run:
        for one in planned:
            print(command(one))
        with err.status("measuring a few steps of each kind of run"):
            err.print(_costs(estimate(planned)), highlight=False)
        return
    failed: list[Outcome] = []
    if not ledger:
        with many(planned, err) as watch:
            outcomes = compute(planned, folder, jobs=jobs, engine=engine, watch=watch)
        failed = [o for o in outcomes if o.result is None]
    found = opened(names, size, folder, not ledger)
    text = "\n".join(book.markdown() for book in found)
    place = folder / f"ledger-{scale}{'' if name == 'all' else '-' + name}"
    write_json(place.with_suffix(".json"), [book.facts() for book in found])
    write_bytes(place.with_suffix(".md"), text.encode())
    for book in found:
        book.draw(folder / f"{book.table.name}-{scale}")
        for reason in dict.fromkeys(book.reasons):
            err.print(f"note: {reason}", highlight=False)
    if as_json:
        print(json.dumps([book.facts() for book in found]))
    else:
        print(text)
        out.print(f"wrote {place}.md and .json", highlight=False)
    if failed:
        raise BadInput(f"{len(failed)} of {len(planned)} runs failed; first: {failed[0].error}")


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
    """What a run, or every run of a grid's file, would cost: time and memory. An estimate."""
    from dosapp.grid import plan as every
    from dosapp.plan import settings_from
    from dosapp.timing import USED, gpus
    from dosapp.timing import estimate as predict

    many = config is not None and bool({"runs", "seeds"} & set(read_yaml(config)))
    if many and (flags or options):
        raise BadInput(f"'{config}' describes many runs; flags cannot change them here")
    chosen = {**flags, "options": parsed(options or [])}
    planned = every(config) if many and config else [settings_from(config, chosen)]
    with err.status("measuring a few steps of each kind of run"):
        cost = predict(planned, gpu)
    assumed = None if gpu is None else {"gpu": gpu, **gpus()[gpu], "used": USED}
    if as_json:
        print(json.dumps({**vars(cost), "assumed": assumed}))
        return
    out.print(_costs(cost), highlight=False)
    if gpu is None:
        out.print("from a few steps on this machine as it is now", style="dim", highlight=False)
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
    """Choose learning rates on the first task's training images, and nothing else."""
    import yaml

    from dosapp.plan import settings_from
    from dosapp.storage import write_bytes
    from dosapp.tune import RATES
    from dosapp.tune import tune as choose

    try:
        wanted = [float(r) for r in rates.split(",")] if rates else RATES
    except ValueError as error:
        raise BadInput(f"rates are '{rates}'; write them as 1e-4,3e-4") from error
    found: dict[str, Any] = {"rates": {}, "seen": {}}
    commands = [f"# {' '.join(['dosapp', *sys.argv[1:]])}\n"]
    if file.exists():  # what was tuned before stays, with the command that did it
        found |= read_yaml(file)
        commands = [n for n in file.read_text().splitlines(True) if n[0] == "#"] + commands
    for method in methods.split(","):
        settings = settings_from(
            None, {**flags, "method": method, "options": parsed(options or [])}
        )
        with err.status(f"tuning {method}") as status:

            def watch(method: str, lr: float, seed: int, status: Status = status) -> None:
                status.update(f"tuning {method}: {lr:g}, seed {seed}")

            tuned = choose(settings, rates=wanted, seeds=tries, watch=watch)
        found["rates"][method] = tuned.lr
        found["seen"][method] = tuned.seen()
        if not as_json:
            out.print(f"{method}: {tuned.lr:g}   {tuned.seen()['accuracy']}", highlight=False)
    text = yaml.safe_dump(found, sort_keys=False, allow_unicode=True)
    write_bytes(file, ("".join(commands) + text).encode())
    if as_json:
        print(json.dumps(found))
    else:
        out.print(f"wrote {file}", highlight=False)


@app.command()
def pretrain(
    folder: Annotated[Path, typer.Option("--out", help="where the model goes")] = Path("tiny"),
    steps: Annotated[int, typer.Option(min=1)] = 3400,
    seed: int = 0,
) -> None:
    """Train the embedded tiny CLIP again, from nothing. About twenty minutes on two cores."""
    from rich.progress import track

    from dosapp.pretrain import pretrain as train

    if folder.exists() and any(folder.iterdir()):
        raise BadInput(f"'{folder}' is not empty; choose another --out")
    ticks = iter(track(range(steps), "pretraining", console=err))

    def watch(step: int, loss: float) -> None:
        next(ticks, None)
        if step % 200 == 0 and not err.is_terminal:
            err.print(f"step {step}/{steps}: loss {loss:.3f}", highlight=False)

    train(folder, steps=steps, seed=seed, watch=watch)
    out.print(f"wrote {folder}; use it with --backbone {folder}", highlight=False)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="one method, with all its settings")] = None,
    abilities: Annotated[bool, typer.Option(help="the paper's table of who can do what")] = False,
    as_json: Json = False,
) -> None:
    """What can learn, and what can adapt."""
    from dosapp.methods import METHODS

    if abilities:
        from dosapp.report.tables import abilities as table

        print(table(), end="")
        return

    if name is not None and name not in METHODS:
        raise unknown("method", name, METHODS, "dosapp methods")
    chosen = {n: kind for n, kind in METHODS.items() if name in (None, n)}
    facts: dict[str, dict[str, Any]] = {
        n: {
            "idea": kind.idea,
            "reference": kind.reference,
            "phase": kind.phase,
            "stores_data": kind.stores_data,
            "abilities": None if kind.abilities is None else sorted(kind.abilities),
            "settings": kind().settings(),
        }
        for n, kind in chosen.items()
    }
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    words = {
        "labelled": "with labels",
        "unlabelled": "without labels",
        "both": "with and without labels",
        "none": "never learns",
    }
    for n, fact in facts.items():
        stores = "stores pictures of the stream" if fact["stores_data"] else "stores no data"
        out.print(f"[bold]{n}[/bold]  {fact['idea']}", highlight=False)
        out.print(f"  {fact['reference']}; {words[fact['phase']]}; {stores}", highlight=False)
        given = fact["settings"]
        if name is None:
            short = " ".join(f"{k.rpartition('.')[2]}={v}" for k, v in given.items())
            if short:
                out.print(f"  {short}", style="dim", highlight=False, markup=False)
            continue
        for key, value in given.items():
            line = f"  --set {key.rpartition('.')[2]}={value}    ({key})"
            out.print(line, highlight=False, markup=False)
    if name is None:
        out.print("\nany learner adapts with any adapter: --method spu --adapt self-training")


@app.command()
def datasets(as_json: Json = False) -> None:
    """What can be learned from."""
    from dosapp.data import DOMAINS
    from dosapp.data.known import described

    facts: dict[str, dict[str, Any]] = {
        d.name: {"classes": d.benchmark, "idea": d.idea} for d in DOMAINS.values()
    } | described()
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    for name, fact in facts.items():
        out.print(f"[bold]{name}[/bold]  {fact['classes']} classes: {fact['idea']}")
    out.print("[bold]PATH[/bold]    a folder of class folders, or a CSV of path,label[,split]")
    out.print("[bold]a+b[/bold]     one after the other, for example shapes+signs")


@app.command()
def backbones(as_json: Json = False) -> None:
    """What can be taught."""
    from dosapp.backbones.clip import KNOWN

    facts = {"tiny": "embedded: 32 px, 1.2 M weights, pretrained on generated pictures"}
    facts |= {name: f"{hub} from the hub, or its cache" for name, hub in KNOWN.items()}
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    for name, fact in facts.items():
        out.print(f"[bold]{name}[/bold]  {fact}", highlight=False)
    out.print("[bold]FOLDER[/bold] or [bold]org/name[/bold]  any CLIPModel with its processor")


@app.command()
def bench(
    quick: Annotated[bool, typer.Option(help="fewer repetitions, and nothing at batch 64")] = False,
    repeats: Annotated[int | None, typer.Option(min=1, help="timed rounds [7, quick 2]")] = None,
    growth: Annotated[bool, typer.Option(help="also: with classes, batch, tasks seen")] = False,
    model: Annotated[str, typer.Option(help="ViT-B-16, middle or small")] = "ViT-B-16",
    folder: Annotated[
        Path | None, typer.Option("--out", help="write bench.json, .md and figures there")
    ] = None,
    as_json: Json = False,
) -> None:
    """Ratios to a plain implementation and to bare inference, on a CLIP with random weights."""
    from dosapp.bench.growth import growth as grow
    from dosapp.bench.measure import bench as measure
    from dosapp.bench.model import MODELS
    from dosapp.report.speed import details, slopes, table, write_speed

    if model not in MODELS:
        raise unknown("model", model, MODELS)
    config = MODELS[model]()
    with err.status(f"building {model}") as status:
        found = {
            "model": model,
            **measure(config, quick=quick, repeats=repeats, watch=status.update),
        }
        if growth:
            found["growth"] = grow(config, repeats=1 if quick else 3, watch=status.update)
    if folder is not None:
        write_speed(found, folder)
    if as_json:
        print(json.dumps(found))
        return
    print(f"{table(found)}\n{details(found)}", end="")
    if growth:
        print(f"\n{slopes(found['growth'])}", end="")
    if folder is not None:
        out.print(f"wrote {folder}/bench.json, .md and figures", highlight=False)


app.command()(commands.serve)
app.add_typer(commands.token_app, name="token")
app.add_typer(commands.client_app, name="client")


@app.command()
def drill(
    name: Annotated[
        Literal["guards", "crash", "load", "bad-input"], typer.Argument(help="what to try")
    ],
    folder: Annotated[Path, typer.Option("--out", help="where the findings go")] = Path("drills"),
    quick: Annotated[bool, typer.Option(help="a few minutes at most, and weaker findings")] = False,
) -> None:
    """Try a promise of the service on purpose: harmful streams, crashes, load, bad requests."""
    from dosapp.drills import hold
    from dosapp.drills.figures import draw
    from dosapp.storage import write_json

    with err.status(name) as status:
        found = hold(name, quick, status.update)
    place = folder / f"{name}.json"
    write_json(place, found)
    draw(name, found, folder)
    print(json.dumps(found, indent=1))
    out.print(f"wrote {place}", highlight=False)


@app.command()
@with_settings(LearnerSettings)
def new(
    flags: dict[str, Any],
    folder: Annotated[Path, typer.Argument(help="a folder that is not there yet")],
    options: SetOption = None,
) -> None:
    """A learner that knows no class yet, to be taught by dosapp serve or from a program."""
    from dosapp.learner import Learner

    if folder.exists():
        raise BadInput(f"'{folder}' is there already; choose another folder")
    Learner(LearnerSettings.checked({**flags, "options": parsed(options or [])})).save(
        folder, "new"
    )
    out.print(f"wrote {folder}; now: dosapp serve {folder}", highlight=False)


history_app = typer.Typer(
    help="What a learner was: its versions, what changed, and the way back.", no_args_is_help=True
)
app.add_typer(history_app, name="history")
LearnerFolder = Annotated[Path, typer.Argument(help="a learner's folder")]
Number = Annotated[int, typer.Argument(min=1, help="a version's number")]
From = Annotated[int, typer.Argument(min=0, help="a version's number; 0: before any learning")]


@history_app.command("list")
def history_list(folder: LearnerFolder, as_json: Json = False) -> None:
    """Every version: when, why, how many classes, how many bytes."""
    from dosapp.learner import Learner

    found = Learner.history_of(folder).versions()
    if as_json:
        print(json.dumps([vars(version) for version in found], indent=1))
        return
    table = Table(box=None, header_style="bold")
    for head in ("version", "when", "why", "classes", "kB"):
        table.add_column(head, justify="right" if head in ("version", "classes", "kB") else "left")
    for v in found:
        count = str(len(v.facts["classes"]))
        table.add_row(str(v.number), v.created, v.reason, count, f"{v.size / 1000:,.0f}")
    out.print(table)


@history_app.command("show")
def history_show(folder: LearnerFolder, number: Number, as_json: Json = False) -> None:
    """One version, whole."""
    from dosapp.learner import Learner

    version = Learner.history_of(folder).version(number)
    if as_json:
        print(json.dumps(vars(version), indent=1))
        return
    lines = {
        "version": f"{version.number}, {version.reason}, {version.created}",
        "checksum": version.checksum,
        "parent": version.parent or "none",
        "classes": ", ".join(version.facts["classes"]),
        "sessions, steps": f"{version.facts['sessions']}, {version.facts['steps']}",
        "measured": json.dumps(version.seen) if version.seen else "nothing",
    }
    for name, value in lines.items():
        out.print(f"[bold]{name}[/bold]  {value}", highlight=False)


@history_app.command("diff")
def history_diff(folder: LearnerFolder, first: From, second: From, as_json: Json = False) -> None:
    """Which layers moved from one version to another, and how far."""
    from dosapp.learner import Learner

    found = Learner.history_of(folder).moved(first, second)
    if as_json:
        print(json.dumps([vars(one) for one in found], indent=1))
        return
    table = Table(box=None, header_style="bold")
    for head in ("tensor", "entries", "of", "distance", "largest"):
        table.add_column(head, justify="left" if head == "tensor" else "right")
    for one in found:
        table.add_row(
            one.name, f"{one.entries:,}", f"{one.of:,}", f"{one.distance:.4g}", f"{one.largest:.3g}"
        )
    out.print(table if found else f"versions {first} and {second} are the same")


@history_app.command("rollback")
def history_rollback(folder: LearnerFolder, number: Number) -> None:
    """Go back to a version, as a new one on top: nothing is lost."""
    from dosapp.learner import Learner
    from dosapp.storage import locked

    Learner.history_of(folder).version(number)  # before anything is touched
    with locked(folder):
        made = Learner.rollback(folder, number).history(folder).versions()[-1]
    out.print(f"version {made.number} is what version {number} was", highlight=False)


@history_app.command("gc")
def history_gc(
    folder: LearnerFolder,
    keep: Annotated[int, typer.Option(min=1, help="how many of the last versions stay")],
) -> None:
    """Drop old versions; the oldest that stays takes in what came before it."""
    from dosapp.learner import Learner
    from dosapp.storage import locked

    history = Learner.history_of(folder)
    with locked(folder):
        gone = history.forget(keep)
    out.print(f"{gone} version(s) dropped", highlight=False)


@app.command()
def export(
    folder: LearnerFolder,
    place: Annotated[Path, typer.Argument(help="a new folder")],
    kind: Annotated[Literal["pretrained", "onnx"], typer.Option()] = "pretrained",
) -> None:
    """What answers, as a plain model: for transformers, or the image tower as ONNX."""
    from dosapp.export import export as write
    from dosapp.learner import Learner

    write(Learner.load(folder), place, kind)
    out.print(f"wrote {place}", highlight=False)


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
    """Results → report.md, .csv, .tex, .html, and figures as PNG, SVG and PDF."""
    from dosapp.grid import rows_of
    from dosapp.report import write_report
    from dosapp.report.tables import COLUMNS, WITH_COSTS
    from dosapp.store import results

    found = results(places)
    if grid_file is not None:
        found = rows_of(grid_file, found)
    write_report(found, folder, title, against, WITH_COSTS if costs else COLUMNS)
    show(found, as_json, costs)
    if not as_json:
        out.print(f"wrote {folder}/report.html, .md, .csv, .tex and figures", highlight=False)


def main() -> None:
    """The one place where a user's mistake becomes a sentence and exit code 2."""
    if os.environ.get("RANK", "0") != "0":  # of several processes under torchrun the first speaks
        sys.stdout, err.quiet = open(os.devnull, "w"), True  # noqa: SIM115
    warnings.showwarning = lambda message, *_: err.print(f"note: {message}", highlight=False)
    try:
        app()
    except BadInput as error:
        err.print(f"dosapp: {error}", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)
    except OSError as error:
        where = error.filename or "the disk"
        err.print(f"dosapp: cannot use '{where}' ({error.strerror})", highlight=False, markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("stopped; --resume goes on from the last checkpoint")
        sys.exit(130)


if __name__ == "__main__":
    main()
