"""Who taught, rolled back or froze, when, and which version came of it. No pictures, ever."""

import datetime
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Audit:
    """`audit.jsonl` in a learner's folder: one line per deed, only ever added to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "audit.jsonl"
        self._turn = threading.Lock()

    def write(self, what: str, who: str, facts: Mapping[str, Any]) -> None:
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"when": when, "who": who, "what": what, **facts}, ensure_ascii=False)
        with self._turn, self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def last(self, count: int = 100) -> list[dict[str, Any]]:
        """The last deeds; a line that was cut off by a crash is left out."""
        if not self.path.exists():
            return []
        found = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found
