"""Write the tables between `<!-- NAME -->` and `<!-- end -->` of the documents from stored results.

python tools/update_tables.py     # after new results; tests compare the tables with the results
"""

import re
from pathlib import Path

from dosapp.experiments.grid import select_results
from dosapp.experiments.store import read_results
from dosapp.report.tables import build_rows, paired_differences, to_markdown

ROOT = Path(__file__).parent.parent
# name of the table → page, grid file, result store, row that others are compared with
TABLES = {
    "headline": ("README.md", "headline", "hard", None),
    "hard": ("docs/does-it-work.md", "hard", "hard", None),
    "class-orders": ("docs/does-it-work.md", "class-orders", "hard", None),
    "hard-paired": ("docs/does-it-work.md", "hard", "hard", "DoSAPP"),
    "real": ("docs/does-it-work.md", "real", "real-small", None),
    "real-paired": ("docs/does-it-work.md", "real", "real-small", "DoSAPP"),
    "real-batch-16": ("docs/does-it-work.md", "real-batch-16", "real-small", None),
    "gtsrb": ("docs/does-it-work.md", "real-gtsrb", "real-small", None),
    "baselines": ("docs/beyond.md", "baselines", "hard", None),
    "session-drift": ("docs/beyond.md", "session-drift", "hard", None),
    "readings": ("docs/readings.md", "readings", "hard", None),
}


def main() -> None:
    """Rewrite every table."""
    for name, (page, grid, store, reference) in TABLES.items():
        stored = read_results([ROOT / "results" / store])
        rows = build_rows(select_results(ROOT / "configs" / f"{grid}.yaml", stored))
        table = paired_differences(rows, reference) if reference else to_markdown(rows)
        text = (ROOT / page).read_text()
        pattern = rf"(?s)(<!-- {name} -->\n).*?(<!-- end -->)"
        (ROOT / page).write_text(re.sub(pattern, rf"\g<1>{table.strip()}\n\g<2>", text))


if __name__ == "__main__":
    main()
