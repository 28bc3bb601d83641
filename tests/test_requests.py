"""docs/requests.md: every request is answered, and every test that it names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES = (ROOT / "docs" / "requests.md").read_text().splitlines()
ROWS = [line.strip("| ").split(" | ") for line in LINES if re.match(r"\| \d", line)]


def test_there_are_49_requests_with_an_answer() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, 50))
    assert all(len(row) == 5 and all(row) for row in ROWS)


def test_at_least_38_have_a_test_and_each_test_exists() -> None:
    named = [row[4].strip("`") for row in ROWS if row[4].startswith("`tests/")]
    assert len(named) >= 38
    for name in named:
        file, _, function = name.partition("::")
        assert re.search(rf"^ *def {function}\(", (ROOT / file).read_text(), re.MULTILINE), name
