"""Commands for developers: pretrain the embedded model, benchmark, stress the service."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from dosapp.cli.console import Json, app, err, out
from dosapp.errors import InputError, unknown_name


@app.command()
def pretrain(
    folder: Annotated[Path, typer.Option("--out", help="folder of the model")] = Path("tiny"),
    steps: Annotated[int, typer.Option(min=1, help="training steps")] = 3400,
    seed: int = 0,
) -> None:
    """Train the embedded tiny CLIP from scratch. About twenty minutes on two cores."""
    from rich.progress import track

    from dosapp.backbones.pretrain import pretrain as train

    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"'{folder}' is not empty; choose another --out")
    ticks = iter(track(range(steps), "pretraining", console=err))

    def show_progress(step: int, loss: float) -> None:
        next(ticks, None)
        if step % 200 == 0 and not err.is_terminal:
            err.print(f"step {step}/{steps}: loss {loss:.3f}")

    train(folder, steps=steps, seed=seed, on_step=show_progress)
    out.print(f"wrote {folder}; use it with --backbone {folder}")


@app.command()
def bench(
    quick: Annotated[bool, typer.Option(help="fewer repetitions, no batches of 64")] = False,
    repeats: Annotated[int | None, typer.Option(min=1, help="timed rounds [7, quick 2]")] = None,
    growth: Annotated[
        bool, typer.Option(help="also vary classes, batch size and tasks seen")
    ] = False,
    model: Annotated[str, typer.Option(help="ViT-B-16, middle or small")] = "ViT-B-16",
    methods: Annotated[
        str | None, typer.Option(help="instead, stream steps of these methods: dosapp,stream-gda")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="folder for bench.json, bench.md and figures")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure speed relative to a plain implementation.

    And relative to inference alone, on a CLIP with random weights.
    """
    from dosapp.bench.measure import run_benchmark
    from dosapp.bench.methods import compare_methods
    from dosapp.bench.model import MODELS
    from dosapp.bench.scaling import measure_growth
    from dosapp.report.speed import (
        format_costs,
        format_details,
        format_growth,
        format_ratios,
        write_speed,
    )
    from dosapp.runtime.extras import check_extra
    from dosapp.runtime.files import write_json

    if model not in MODELS:
        raise unknown_name("model", model, MODELS)
    if methods is not None:
        names = methods.split(",")
        size = {"batch_size": 8, "classes": 20} if quick else {}
        with err.status(f"building {model}") as status:
            costs = compare_methods(
                MODELS[model](),
                names,
                **size,
                repeats=repeats or (2 if quick else 7),
                on_progress=status.update,
            )
        if folder is not None:
            write_json(folder / "methods.json", {"model": model, "methods": costs})
        print(json.dumps(costs) if as_json else format_costs(costs).rstrip())
        return
    if folder is not None:
        check_extra("a figure", "report")
    config = MODELS[model]()
    with err.status(f"building {model}") as status:
        result = {
            "model": model,
            **run_benchmark(config, quick=quick, repeats=repeats, on_progress=status.update),
        }
        if growth:
            result["growth"] = measure_growth(
                config, repeats=repeats or (1 if quick else 3), on_progress=status.update
            )
    if folder is not None:
        write_speed(result, folder)
    if as_json:
        print(json.dumps(result))
        return
    print(f"{format_ratios(result)}\n{format_details(result)}", end="")
    if growth:
        print(f"\n{format_growth(result['growth'])}", end="")
    if folder is not None:
        out.print(f"wrote {folder}/bench.json, .md and figures")


@app.command()
def drill(
    name: Annotated[
        Literal["guards", "poison", "crash", "load", "availability", "bad-input"],
        typer.Argument(help="which drill"),
    ],
    folder: Annotated[Path, typer.Option("--out", help="where to write the results")] = Path(
        "drills"
    ),
    quick: Annotated[
        bool, typer.Option(help="a few minutes at most, and fewer repetitions")
    ] = False,
) -> None:
    """Stress the service and measure what happens.

    Harmful streams, poisoning, crashes, load, floods of requests, or bad requests. Poisoning takes
    hours; stopped, it continues with the attacks that are missing in its folder.
    """
    from dosapp.drills import run_drill
    from dosapp.drills.figures import write_figure
    from dosapp.runtime.files import write_json

    with err.status(name) as status:
        result = run_drill(name, quick, folder, status.update)
    file = folder / f"{name}.json"
    write_json(file, result)
    write_figure(name, result, folder)
    print(json.dumps(result, indent=1))
    out.print(f"wrote {file}")
