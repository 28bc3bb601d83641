"""Commands that test ourselves: the embedded model again, speed, the service's promises."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from dosapp.cli.console import Json, app, err, out
from dosapp.errors import InputError, unknown_name


@app.command()
def pretrain(
    folder: Annotated[Path, typer.Option("--out", help="where the model goes")] = Path("tiny"),
    steps: Annotated[int, typer.Option(min=1)] = 3400,
    seed: int = 0,
) -> None:
    """Train the embedded tiny CLIP again, from nothing. About twenty minutes on two cores."""
    from rich.progress import track

    from dosapp.backbones.pretrain import pretrain as train

    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"'{folder}' is not empty; choose another --out")
    ticks = iter(track(range(steps), "pretraining", console=err))

    def watch(step: int, loss: float) -> None:
        next(ticks, None)
        if step % 200 == 0 and not err.is_terminal:
            err.print(f"step {step}/{steps}: loss {loss:.3f}")

    train(folder, steps=steps, seed=seed, watch=watch)
    out.print(f"wrote {folder}; use it with --backbone {folder}")


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
    """How fast we are, as ratios to a plain implementation.

    And to bare inference, on a CLIP with random weights.
    """
    from dosapp.bench.measure import bench as measure
    from dosapp.bench.model import MODELS
    from dosapp.bench.scaling import growth as grow
    from dosapp.report.speed import details, slopes, table, write_speed

    if model not in MODELS:
        raise unknown_name("model", model, MODELS)
    config = MODELS[model]()
    with err.status(f"building {model}") as status:
        found = {
            "model": model,
            **measure(config, quick=quick, repeats=repeats, watch=status.update),
        }
        if growth:
            found["growth"] = grow(
                config, repeats=repeats or (1 if quick else 3), watch=status.update
            )
    if folder is not None:
        write_speed(found, folder)
    if as_json:
        print(json.dumps(found))
        return
    print(f"{table(found)}\n{details(found)}", end="")
    if growth:
        print(f"\n{slopes(found['growth'])}", end="")
    if folder is not None:
        out.print(f"wrote {folder}/bench.json, .md and figures")


@app.command()
def drill(
    name: Annotated[
        Literal["guards", "crash", "load", "bad-input"], typer.Argument(help="what to try")
    ],
    folder: Annotated[Path, typer.Option("--out", help="where the findings go")] = Path("drills"),
    quick: Annotated[bool, typer.Option(help="a few minutes at most, and weaker findings")] = False,
) -> None:
    """Try a promise of the service on purpose.

    Harmful streams, crashes, load, bad requests.
    """
    from dosapp.drills import run_drill
    from dosapp.drills.figures import draw
    from dosapp.runtime.files import write_json

    with err.status(name) as status:
        found = run_drill(name, quick, status.update)
    place = folder / f"{name}.json"
    write_json(place, found)
    draw(name, found, folder)
    print(json.dumps(found, indent=1))
    out.print(f"wrote {place}")
