"""The command for studies: variants compared on development and held-out data."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dosapp.cli.console import app, err, out
from dosapp.cli.experiments import check_failures
from dosapp.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dosapp.experiments.grid import Outcome
    from dosapp.experiments.result import Result


@app.command()
def study(
    file: Annotated[Path, typer.Argument(help="YAML: variants, reference, development, held_out")],
    folder: Annotated[Path, typer.Option("--out", help="the result store")] = Path("runs"),
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = 1,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="open the held-out data, once and for all")
    ] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="compute nothing")] = False,
) -> None:
    """Compare variants on development data, once on held-out data.

    Differences are paired by seed and class order and corrected for their number. Writes STUDY.md
    and the figure STUDY-pareto beside the results.
    """
    from dosapp.cli.progress import grid_progress
    from dosapp.experiments.grid import run_grid
    from dosapp.experiments.store import Store
    from dosapp.experiments.study import Study, open_held_out
    from dosapp.report.study import compare_variants, compute_costs, format_study, plot_pareto
    from dosapp.runtime.extras import check_extra
    from dosapp.runtime.files import write_bytes

    check_extra("a study", "report")
    outcomes: Sequence[Outcome] = []
    plan = Study.read(file)
    record = open_held_out(file, plan) if held_out else None
    runs = list(plan.runs(held_out))
    settings = list({r.settings.model_dump_json(): r.settings for r in runs}.values())
    if not report_only:
        with grid_progress(settings, err) as show_outcome:
            outcomes = run_grid(settings, folder, jobs=jobs, on_outcome=show_outcome)
    results: dict[str, dict[str, dict[tuple[int, object], Result]]] = {}
    store, missing = Store(folder), 0
    for run in runs:
        result = store.find_result(run.settings)
        if result is None:
            missing += 1
            continue
        at = (run.settings.seed, run.settings.class_order_seed)
        dataset = run.dataset + (" (held out)" if run.is_held_out else "")
        results.setdefault(dataset, {}).setdefault(run.variant, {})[at] = result
    if not any(plan.reference in variants for variants in results.values()):
        check_failures(outcomes)
        raise InputError(
            f"no run of '{plan.reference}' in '{file}' is stored in '{folder}'; compute it first"
        )
    comparisons = compare_variants(results, plan.reference)
    costs = compute_costs(results, plan.reference)
    note = f"Differences to {plan.reference}, paired by seed and class order, with 95 % intervals; "
    note += (
        "a star: not zero at 5 % after Holm's correction. Time is a ratio of wall clocks: it means "
    )
    note += "little if other programs ran meanwhile. "
    note += (
        f"Held-out data was opened on {record['opened']}." if record else "Development data only."
    )
    note += f" {missing} of {len(runs)} runs are not computed yet." if missing else ""
    text = f"# {file.stem}\n\n{note}\n\n{format_study(comparisons, costs)}"
    write_bytes(folder / f"{file.stem}.md", text.encode())
    plot_pareto(comparisons, costs, folder / f"{file.stem}-pareto")
    out.print(text, markup=False, highlight=False)
    check_failures(outcomes)
    out.print(f"wrote {folder}/{file.stem}.md and {file.stem}-pareto.png, .svg, .pdf")
