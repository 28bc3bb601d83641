"""Commands that list methods, datasets and backbones."""

import json
from typing import Annotated, Any

import typer

from dosapp.cli.console import Json, app, out
from dosapp.errors import unknown_name


@app.command()
def methods(
    name: Annotated[
        str | None, typer.Argument(help="one method, with its hyper-parameters")
    ] = None,
    abilities: Annotated[
        bool, typer.Option(help="the paper's table of what methods can do")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the methods of the labelled and the unlabelled phase."""
    from dosapp.methods.registry import METHODS, STAGES, import_methods

    if abilities:
        from dosapp.report.tables import abilities_table

        print(abilities_table(), end="")
        return

    import_methods(name)
    listed = {**METHODS, **STAGES}
    if name is not None and name not in listed:
        raise unknown_name("method", name, listed, "dosapp methods")
    facts: dict[str, dict[str, Any]] = {
        key: {
            "idea": method.summary,
            "reference": method.reference,
            "phase": method.phase,
            "stores_data": method.stores_data,
            "abilities": None if method.abilities is None else sorted(method.abilities),
            "settings": method().hyperparameters(),
        }
        for key, method in listed.items()
        if name in (None, key)
    }
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    phases = {
        "labelled": "with labels",
        "unlabelled": "without labels",
        "both": "with and without labels",
        "none": "never trains",
        "stage": "after the epochs of any labelled method",
    }
    for key, fact in facts.items():
        stores = "stores images of the stream" if fact["stores_data"] else "stores no data"
        out.print(f"[bold]{key}[/bold]  {fact['idea']}", markup=True)
        out.print(f"  {fact['reference']}; {phases[fact['phase']]}; {stores}")
        options = [(path.rpartition(".")[2], path, v) for path, v in fact["settings"].items()]
        if name is not None:
            for option, path, value in options:
                out.print(f"  --set {option}={value}    ({path})")
        elif options:
            out.print("  " + " ".join(f"{o}={value}" for o, _, value in options), style="dim")
    if name is None:
        out.print("\nmethods of the two phases combine: --method spu --adapt self-training")
        out.print("stages go with any of them: --merging magmax, --align")


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
    out.print(
        "[bold]a+b[/bold]     several datasets in sequence, for example shapes+signs", markup=True
    )


@app.command()
def backbones(as_json: Json = False) -> None:
    """List the backbones."""
    from dosapp.backbones.names import HUB_IDS

    facts = {"tiny": "embedded: 32 px, 1.2 M weights, pretrained on generated images"}
    facts |= {name: f"{hub_id} from the hub, or its cache" for name, hub_id in HUB_IDS.items()}
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    for name, fact in facts.items():
        out.print(f"[bold]{name}[/bold]  {fact}", markup=True)
    out.print(
        "[bold]FOLDER[/bold] or [bold]org/name[/bold]  "
        "any CLIP, SigLIP, VisionTextDualEncoder or checkpoint of open_clip",
        markup=True,
    )
