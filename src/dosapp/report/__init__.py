"""Reports of results: tables, figures, and one HTML page that works offline."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dosapp.experiments.result import Result
from dosapp.report.robustness import robustness_table
from dosapp.report.stream_gain import compute_stream_gains
from dosapp.report.tables import (
    COLUMNS,
    MEANINGS,
    Row,
    build_rows,
    find_best,
    metric_definitions,
    paired_differences,
    stream_statistics,
    to_csv,
    to_latex,
    to_markdown,
)
from dosapp.runtime.extras import check_extra
from dosapp.runtime.files import ensure_dir, write_bytes

CAPTIONS = {
    "accuracy": "Accuracy on the tasks seen so far",
    "forgetting": "Forgetting of each task after each session (blue: negative)",
    "stream": "Accuracy on earlier tasks, before and after the unlabelled stream",
    "plane": "Final accuracy against forgetting",
    "labels": "Pseudo-labels that are correct",
    "sweeps": "Accuracy and forgetting over single settings, all others being equal",
    "costs": "Time and memory",
    "gain": "What the stream is worth: gain in accuracy against correct pseudo-labels",
}


def write_report(
    results: Sequence[Result],
    folder: Path,
    title: str,
    against: str | None = None,
    columns: Mapping[str, str] = COLUMNS,
) -> list[Row]:
    """Write `report.md`, `.csv`, `.tex` and `.html`, and figures as PNG, SVG and PDF.

    Args:
        results: The results; each dataset gets figures of its own.
        folder: Where the files are written.
        title: Title of the report.
        against: Name of a row that is subtracted from the others in a second table.
        columns: Metrics and costs → column titles.

    Returns:
        The rows of the table.

    Raises:
        InputError: The results cannot stand in one table, or the extra 'report' is not installed.
    """
    check_extra("a report with figures", "report")
    import jinja2
    import matplotlib.pyplot as plt

    from dosapp.report import figures

    table = build_rows(results)
    differences = [] if against is None else [paired_differences(table, against)]
    ensure_dir(folder)
    page_figures, datasets = [], list(dict.fromkeys(row.data for row in table))
    for data in datasets:
        rows = [replace(row, show_data=False) for row in table if row.data == data]
        suffix = "-" + re.sub(r"[^\w+]+", "-", data) if len(datasets) > 1 else ""
        addition = f", {data}" if len(datasets) > 1 else ""
        for name, figure in figures.draw_figures(rows).items():
            figures.save_figure(figure, folder, name + suffix)
            page_figures.append((CAPTIONS[name] + addition, figures.to_svg(figure)))
            plt.close(figure)
    gains = figures.plot_stream_gains(compute_stream_gains(results))
    if gains is not None:
        figures.save_figure(gains, folder, "gain")
        page_figures.append((CAPTIONS["gain"], figures.to_svg(gains)))
        plt.close(gains)
    definitions = metric_definitions(results, columns)
    page = jinja2.Template((Path(__file__).parent / "page.html.j2").read_text(), autoescape=True)
    html = page.render(
        title=title,
        intro=describe_scenarios(results),
        rows=table,
        columns=columns,
        meanings=MEANINGS,
        best=find_best(table, columns),
        figures=page_figures,
        definitions=definitions,
        differences=[_table_cells(markdown) for markdown in differences],
        provenance=describe_provenance(results),
    )
    write_bytes(folder / "report.html", html.encode())
    parts = [f"# {title}\n", to_markdown(table, columns), f"{definitions}\n", *differences]
    parts += [stream_statistics(table), robustness_table(table)]
    write_bytes(folder / "report.md", "\n".join(parts).encode())
    write_bytes(folder / "report.csv", to_csv(table, columns).encode())
    write_bytes(folder / "report.tex", to_latex(table, columns).encode())
    return table


def _table_cells(markdown: str) -> list[list[str]]:
    """Head and rows of a Markdown table."""
    head, _, *rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in markdown.splitlines()
    ]
    return [head, *rows]


def describe_scenarios(results: Sequence[Result]) -> str:
    """A sentence about the classes and sessions; joint training has the same tasks in one."""
    sessions: dict[tuple[str, int], int] = {}
    for result in results:
        scenario = result.stream["name"], sum(len(task["classes"]) for task in result.tasks)
        sessions[scenario] = max(sessions.get(scenario, 0), len(result.R))
    texts = [f"{name}: {n} classes in {t} sessions" for (name, n), t in sessions.items()]
    return f"{', '.join(texts)}; after each session, an unlabelled stream of all classes seen."


def describe_provenance(results: Sequence[Result]) -> str:
    """Backbones, library versions and machines; different values are separated by slashes."""
    facts = (
        (
            f"backbone {r.backbone['name']} ({r.backbone['fingerprint']})",
            *(f"{name} {r.libraries[name]}" for name in ("dosapp", "torch")),
            r.machine,
        )
        for r in results
    )
    return ", ".join(" / ".join(dict.fromkeys(values)) for values in zip(*facts, strict=True))
