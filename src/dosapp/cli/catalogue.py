"""What there is: methods, datasets, backbones."""

import json
from typing import Annotated, Any

import typer

from dosapp.cli.console import Json, app, out
from dosapp.errors import unknown_name


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="one method, with all its settings")] = None,
    abilities: Annotated[bool, typer.Option(help="the paper's table of who can do what")] = False,
    as_json: Json = False,
) -> None:
    """List the methods: what can learn, what can adapt."""
    from dosapp.methods.registry import METHODS

    if abilities:
        from dosapp.report.tables import abilities as table

        print(table(), end="")
        return

    if name is not None and name not in METHODS:
        raise unknown_name("method", name, METHODS, "dosapp methods")
    chosen = {n: kind for n, kind in METHODS.items() if name in (None, n)}
    facts: dict[str, dict[str, Any]] = {
        n: {
            "idea": kind.summary,
            "reference": kind.reference,
            "phase": kind.phase,
            "stores_data": kind.stores_data,
            "abilities": None if kind.abilities is None else sorted(kind.abilities),
            "settings": kind().hyperparameters(),
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
        out.print(f"[bold]{n}[/bold]  {fact['idea']}", markup=True)
        out.print(f"  {fact['reference']}; {words[fact['phase']]}; {stores}")
        given = fact["settings"]
        if name is None:
            short = " ".join(f"{k.rpartition('.')[2]}={v}" for k, v in given.items())
            if short:
                out.print(f"  {short}", style="dim")
            continue
        for key, value in given.items():
            line = f"  --set {key.rpartition('.')[2]}={value}    ({key})"
            out.print(line)
    if name is None:
        out.print("\nany learner adapts with any adapter: --method spu --adapt self-training")


@app.command()
def datasets(as_json: Json = False) -> None:
    """List the datasets."""
    from dosapp.data.paper_sets.datasets import describe_datasets
    from dosapp.data.registry import SYNTHETIC

    facts: dict[str, dict[str, Any]] = {
        d.name: {"classes": d.benchmark, "idea": d.description} for d in SYNTHETIC.values()
    } | describe_datasets()
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    for name, fact in facts.items():
        out.print(f"[bold]{name}[/bold]  {fact['classes']} classes: {fact['idea']}", markup=True)
    out.print(
        "[bold]PATH[/bold]    a folder of class folders, or a CSV of path,label[,split]",
        markup=True,
    )
    out.print("[bold]a+b[/bold]     one after the other, for example shapes+signs", markup=True)


@app.command()
def backbones(as_json: Json = False) -> None:
    """List the backbones."""
    from dosapp.backbones.registry import HUB_IDS

    facts = {"tiny": "embedded: 32 px, 1.2 M weights, pretrained on generated pictures"}
    facts |= {name: f"{hub} from the hub, or its cache" for name, hub in HUB_IDS.items()}
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    for name, fact in facts.items():
        out.print(f"[bold]{name}[/bold]  {fact}", markup=True)
    out.print(
        "[bold]FOLDER[/bold] or [bold]org/name[/bold]  any CLIPModel with its processor",
        markup=True,
    )
