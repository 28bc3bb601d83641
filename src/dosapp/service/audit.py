"""The audit log: who changed the learner, when, and which version it gave. It holds no images."""

import datetime
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dosapp.runtime.files import append_bytes, read_bytes


class Audit:
    """`audit.jsonl` in a learner's folder: one line per change, append-only."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "audit.jsonl"
        self._lock = threading.Lock()

    def write(self, event: str, caller: str, details: Mapping[str, Any]) -> None:
        """Append one line and flush it to disk.

        Raises:
            StorageError: The file cannot be written.
        """
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        entry = {"when": when, "who": caller, "what": event, **details}
        with self._lock:
            append_bytes(self.path, (json.dumps(entry, ensure_ascii=False) + "\n").encode())

    def last(self, count: int = 100) -> list[dict[str, Any]]:
        """Read the last entries; a line that was cut off by a crash is left out."""
        try:
            text = read_bytes(self.path).decode(errors="replace")
        except FileNotFoundError:
            return []
        entries = []
        for line in text.splitlines()[-count:]:
            try:
                entries.append(json.loads(line))
            except (ValueError, RecursionError):
                continue
        return entries
