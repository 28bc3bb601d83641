"""A learner's folder: a chain of versions, and the working checkpoint at its end.

    versions/000001.safetensors   what changed since the parent, with checksum, parent and reason
    working.safetensors           what changed since the last version, and what only the next step
                                  needs (optimizer, memory, position); replaced atomically

The working checkpoint names the version it stands on, so it is the head: a version written after it
was never acknowledged, and is written again. A resumed run, a saved learner and a service read this
folder with this code.
"""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dosapp.errors import BadInput
from dosapp.storage import Base, Damaged, State, applied, changes, read_record, under, write_record

FORMAT = 1


@dataclass(frozen=True)
class Version:
    number: int
    checksum: str
    parent: str  # checksum of the version before, "" for the first
    reason: str
    created: str
    facts: Mapping[str, Any]


class History:
    """`base` gives the tensors before anything was learned, by the names of the state."""

    def __init__(self, folder: Path, base: Base) -> None:
        self.folder, self._base = folder, base
        self._head: tuple[int, str, dict[str, Tensor]] | None = None

    def exists(self) -> bool:
        return self._working.exists()

    @property
    def _working(self) -> Path:
        return self.folder / "working.safetensors"

    def _file(self, number: int) -> Path:
        return self.folder / "versions" / f"{number:06d}.safetensors"

    # Writing

    def commit(self, state: State, reason: str) -> int:
        """Add a version; a checkpoint must follow to acknowledge it."""
        number, parent, tensors = self._at_head()
        record = State(
            changes(state.tensors, tensors, self._base),
            {
                "format": FORMAT,
                "number": number + 1,
                "parent": parent,
                "reason": reason,
                "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "facts": state.facts,
            },
        )
        total = write_record(self._file(number + 1), record)
        self._head = (number + 1, total, {k: t.clone() for k, t in state.tensors.items()})
        return number + 1

    def checkpoint(self, state: State, working: State) -> None:
        """Replace the working checkpoint."""
        number, parent, tensors = self._at_head()
        changed = changes(state.tensors, tensors, self._base)
        record = State(
            {f"state/{k}": t for k, t in changed.items()}
            | {f"working/{k}": t for k, t in working.tensors.items()},
            {
                "format": FORMAT,
                "version": number,
                "checksum": parent,
                "state": state.facts,
                "working": working.facts,
            },
        )
        write_record(self._working, record)

    # Reading

    def resume(self) -> tuple[State, State]:
        """The state and the working part, exactly as they were at the last checkpoint."""
        record, _ = read_record(self._working)
        self._check_format(record.facts, self._working)
        number, parent, tensors = self._replayed(record.facts["version"])
        if parent != record.facts["checksum"]:
            raise Damaged(f"'{self._working}' stands on a version {number} that has been replaced")
        self._head = (number, parent, tensors)
        changed = under("state/", record.tensors)
        now = applied(changed, tensors, self._base)
        working = under("working/", record.tensors)
        return State(now, record.facts["state"]), State(working, record.facts["working"])

    def at(self, number: int) -> State:
        """The state of one version."""
        _, _, tensors = self._replayed(number)
        facts = read_record(self._file(number))[0].facts["facts"] if number else {}
        return State(tensors, facts)

    def versions(self) -> list[Version]:
        found = []
        for path in sorted((self.folder / "versions").glob("*.safetensors")):
            record, total = read_record(path)
            facts = record.facts
            found.append(
                Version(
                    facts["number"],
                    total,
                    facts["parent"],
                    facts["reason"],
                    facts["created"],
                    facts["facts"],
                )
            )
        return found

    def _at_head(self) -> tuple[int, str, dict[str, Tensor]]:
        if self._head is None:
            if self.exists():
                self.resume()
            else:
                self._head = (0, "", {})
        assert self._head is not None
        return self._head

    def _replayed(self, number: int) -> tuple[int, str, dict[str, Tensor]]:
        """Base and versions 1 … `number`, each checked against its child's idea of it."""
        tensors: dict[str, Tensor] = {}
        parent = ""
        for n in range(1, number + 1):
            record, total = read_record(self._file(n))
            self._check_format(record.facts, self._file(n))
            if record.facts["parent"] != parent:
                raise Damaged(f"'{self._file(n)}' does not follow the version before it")
            tensors = applied(record.tensors, tensors, self._base)
            parent = total
        return number, parent, tensors

    def _check_format(self, facts: Mapping[str, Any], path: Path) -> None:
        if facts.get("format") != FORMAT:
            raise BadInput(
                f"'{path}' has format {facts.get('format')}; this dosapp reads format {FORMAT}"
            )
