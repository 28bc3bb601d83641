"""Result files → tables, figures and one page that works offline."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dosapp.errors import BadInput
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
from dosapp.result import Result
from dosapp.storage import write_bytes

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
    """`report.md`, `.csv`, `.tex` and `.html`, and each figure as PNG, SVG and PDF."""
    try:
        import jinja2
        import matplotlib.pyplot as plt

        from dosapp.report import figures
    except ImportError as error:
        raise BadInput(
            f"a report with pictures needs {error.name}; pip install 'dosapp[report]'"
        ) from error
    table = rows(results)
    differences = [] if against is None else [paired(table, against)]
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for name, figure in figures.figures(table).items():
        figures.write(figure, folder, name)
        pictures.append((CAPTIONS[name], figures.inline_svg(figure)))
        plt.close(figure)
    first = results[0]
    sessions = max(len(result.R) for result in results)
    intro = (
        f"{first.stream['name']}: {sum(len(t['classes']) for t in first.tasks)} classes in "
        f"{sessions} sessions; after each, a stream without labels of everything seen so far."
    )
    provenance = (
        f"backbone {first.backbone['name']} ({first.backbone['fingerprint']}), "
        f"dosapp {first.libraries['dosapp']}, torch {first.libraries['torch']}, {first.machine}"
    )
    page = jinja2.Template((Path(__file__).parent / "page.html.j2").read_text(), autoescape=True)
    html = page.render(
        title=title,
        intro=intro,
        rows=table,
        columns=columns,
        pictures=pictures,
        footnote=footnote(results),
        provenance=provenance,
    )
    write_bytes(folder / "report.html", html.encode())
    parts = [f"# {title}\n", markdown(table, columns), footnote(results) + "\n", *differences]
    parts.append(on_the_stream(table))
    write_bytes(folder / "report.md", "\n".join(parts).encode())
    write_bytes(folder / "report.csv", comma_separated(table, columns).encode())
    write_bytes(folder / "report.tex", latex(table, columns).encode())
    return table
