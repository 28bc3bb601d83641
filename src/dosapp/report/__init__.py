"""Result files → tables, figures and one page that works offline."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dosapp.experiments.result import Result
from dosapp.report.tables import (
    COLUMNS,
    Row,
    comma_separated,
    footnote,
    latex,
    markdown,
    on_the_stream,
    paired,
    rows,
)
from dosapp.runtime.extras import missing_extra
from dosapp.runtime.files import write_bytes

CAPTIONS = {
    "accuracy": "Accuracy on everything seen so far",
    "forgetting": "What each session made it forget (red) or recover (blue)",
    "stream": "Earlier tasks, before and after the unlabelled stream",
    "plane": "What it knows at the end, against what it has forgotten",
    "labels": "How often the stream's labels were right",
    "sweeps": "What one number does, all else being equal",
    "costs": "What it cost",
}


def write_report(
    results: Sequence[Result],
    folder: Path,
    title: str,
    against: str | None = None,
    columns: Mapping[str, str] = COLUMNS,
) -> list[Row]:
    """`report.md`, `.csv`, `.tex` and `.html`, and each dataset's figures as PNG, SVG and PDF."""
    try:
        import jinja2
        import matplotlib.pyplot as plt

        from dosapp.report import figures
    except ImportError as error:
        raise missing_extra("a report with figures", "report", error) from error
    table = rows(results)
    differences = [] if against is None else [paired(table, against)]
    folder.mkdir(parents=True, exist_ok=True)
    pictures, sets = [], list(dict.fromkeys(row.data for row in table))
    for data in sets:  # what is learned from other pictures has no place in the same figure
        mine = [replace(row, several=False) for row in table if row.data == data]
        ending = "-" + re.sub(r"[^\w+]+", "-", data) if len(sets) > 1 else ""
        said = f", {data}" if len(sets) > 1 else ""
        for name, figure in figures.figures(mine).items():
            figures.write(figure, folder, name + ending)
            pictures.append((CAPTIONS[name] + said, figures.inline_svg(figure)))
            plt.close(figure)
    formulas = footnote(results, columns)
    page = jinja2.Template((Path(__file__).parent / "page.html.j2").read_text(), autoescape=True)
    html = page.render(
        title=title,
        intro=intro(results),
        rows=table,
        columns=columns,
        pictures=pictures,
        footnote=formulas,
        provenance=provenance(results),
    )
    write_bytes(folder / "report.html", html.encode())
    parts = [f"# {title}\n", markdown(table, columns), f"{formulas}\n", *differences]
    parts.append(on_the_stream(table))
    write_bytes(folder / "report.md", "\n".join(parts).encode())
    write_bytes(folder / "report.csv", comma_separated(table, columns).encode())
    write_bytes(folder / "report.tex", latex(table, columns).encode())
    return table


def intro(results: Sequence[Result]) -> str:
    """What was learned; joint training is the same tasks in one session."""
    sessions: dict[tuple[str, int], int] = {}
    for result in results:
        what = result.stream["name"], sum(len(task["classes"]) for task in result.tasks)
        sessions[what] = max(sessions.get(what, 0), len(result.R))
    streams = [f"{name}: {n} classes in {t} sessions" for (name, n), t in sessions.items()]
    return f"{', '.join(streams)}; after each, a stream without labels of everything seen so far."


def provenance(results: Sequence[Result]) -> str:
    """Everything the results do not have in common is named."""
    said = (
        (
            f"backbone {r.backbone['name']} ({r.backbone['fingerprint']})",
            *(f"{name} {r.libraries[name]}" for name in ("dosapp", "torch")),
            r.machine,
        )
        for r in results
    )
    return ", ".join(" / ".join(dict.fromkeys(one)) for one in zip(*said, strict=True))
