"""The audit log: who changed the learner, when, and which version it gave. It holds no images."""

import datetime
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Audit:
    """`audit.jsonl` in a learner's folder: one line per change, append-only."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "audit.jsonl"
        self._lock = threading.Lock()

    def write(self, event: str, caller: str, details: Mapping[str, Any]) -> None:
        """Append one line and flush it to disk.

        Raises:
            OSError: The file cannot be written.
        """
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        entry = {"when": when, "who": caller, "what": event, **details}
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def last(self, count: int = 100) -> list[dict[str, Any]]:
        """Read the last entries; a line that was cut off by a crash is left out."""
        if not self.path.exists():
            return []
        entries = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]:
            try:
                entries.append(json.loads(line))
            except ValueError:
                continue
        return entries
