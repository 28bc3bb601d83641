"""A learner's folder: a chain of versions, and the working checkpoint at its end.

    versions/000001.safetensors   what changed since the parent, with checksum, parent and reason
    working.safetensors           what changed since the last version, and what only the next step
                                  needs (optimizer, memory, position); replaced atomically

The working checkpoint names the version it stands on, so it is the head: a version written after it
was never acknowledged, and is written again. A resumed run, a saved learner and a service read this
folder with this code.
"""

import datetime
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dosapp.errors import CorruptRecordError, DosappError, InputError
from dosapp.functional.named_tensors import bits_differ, select_prefix
from dosapp.history.delta import BaseTensors, apply_delta, compute_delta
from dosapp.history.record import State, read_facts, read_record, write_record

FORMAT = 1
UPGRADES: dict[int, Callable[[State], State]] = {}  # a record of format n → one of format n + 1


@dataclass(frozen=True)
class Version:
    number: int
    checksum: str
    parent: str  # checksum of the version before, "" for the first
    reason: str
    created: str
    size: int  # bytes on disk
    facts: Mapping[str, Any]  # of the learner: classes, sessions, steps
    seen: Mapping[str, Any]  # what was measured when it was written


@dataclass(frozen=True)
class TensorDiff:
    """How far a tensor is from where it was."""

    name: str  # role/weight
    entries: int
    of: int
    distance: float  # L2
    largest: float  # of an entry


def diff_states(new: State, old: State, base: BaseTensors) -> list[TensorDiff]:
    """What differs between two states, the farthest first."""
    found = []
    for name in {**new.tensors, **old.tensors}:
        after, before = (state.tensors.get(name, base(name)) for state in (new, old))
        like = before if after is None else after
        assert like is not None  # one of them has it
        now, then = (torch.zeros_like(like) if t is None else t for t in (after, before))
        if now.shape != then.shape:  # it has grown or shrunk: all of it is another
            now, then = now.double(), torch.zeros_like(now, dtype=torch.float64)
        where = bits_differ(now, then)
        if where.any():
            gap = (now.double() - then.double())[where]
            size = float(gap.norm()), float(gap.abs().max())
            found.append(TensorDiff(name, int(where.sum()), now.numel(), *size))
    return sorted(found, key=lambda one: -one.distance)


class VersionTensors(NamedTuple):
    """A version, put together from all before it; 0 is before anything was learned."""

    number: int
    checksum: str
    tensors: dict[str, Tensor]


class History:
    """`base` gives the tensors before anything was learned, by the names of the state."""

    def __init__(self, folder: Path, base: BaseTensors) -> None:
        self.folder, self._base = folder, base
        self._head: VersionTensors | None = None
        self._known = VersionTensors(0, "", {})  # what was replayed last
        self.has_corrupt_tail = False  # something after the head cannot be read

    def exists(self) -> bool:
        """Whether anything was ever written here, even if its checkpoint is gone."""
        return self._working.exists() or bool(self._files())

    @property
    def _working(self) -> Path:
        return self.folder / "working.safetensors"

    def _file(self, number: int) -> Path:
        return self.folder / "versions" / f"{number:06d}.safetensors"

    # Writing

    def commit(self, state: State, reason: str, seen: Mapping[str, Any] | None = None) -> int:
        """Add a version; a checkpoint must follow to acknowledge it."""
        number, parent, tensors = self._at_head()
        self._quarantine()
        record = State(
            compute_delta(state.tensors, tensors, self._base),
            {
                "format": FORMAT,
                "number": number + 1,
                "parent": parent,
                "reason": reason,
                "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "facts": state.facts,
                "seen": dict(seen or {}),
            },
        )
        total = write_record(self._file(number + 1), record)
        tensors = {k: t.clone() for k, t in state.tensors.items()}
        self._head = VersionTensors(number + 1, total, tensors)
        return number + 1

    def checkpoint(self, state: State, working: State) -> None:
        """Replace the working checkpoint."""
        number, parent, tensors = self._at_head()
        self._quarantine()
        changed = compute_delta(state.tensors, tensors, self._base)
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
        try:
            write_record(self._working, record)
        except BaseException:
            self._head = None  # a version nobody acknowledged is not built upon
            raise

    # Reading

    def resume(self) -> tuple[State, State]:
        """The state and the working part, exactly as they were at the last checkpoint."""
        record, _ = self._read(self._working)
        head = self._reconstruct(record.facts["version"])
        if head.checksum != record.facts["checksum"]:
            raise CorruptRecordError(
                f"'{self._working}' stands on a version {head.number} that has been replaced"
            )
        self._head = head
        now = apply_delta(select_prefix("state/", record.tensors), head.tensors, self._base)
        working = select_prefix("working/", record.tensors)
        return State(now, record.facts["state"]), State(working, record.facts["working"])

    def recover(self) -> tuple[int, State] | None:
        """The newest version that can be read with all before it, and its number, when the head
        cannot be. What comes after it is set aside by whoever writes next, never deleted."""
        number = self._first() - 1
        while True:
            try:
                self._reconstruct(number + 1)
                number += 1
            except DosappError:
                break
        if number < self._first():
            return None
        self._head, self.has_corrupt_tail = self._reconstruct(number), True
        return number, State(self._head.tensors, dict(self._described(number).facts))

    def reset(self) -> None:
        """For whoever cannot go on without the checkpoint: all versions are set aside."""
        self._head, self.has_corrupt_tail = VersionTensors(0, "", {}), True
        self._quarantine()

    def _quarantine(self) -> None:
        if self.has_corrupt_tail and self._head is not None:
            for number in self._files():
                if number > self._head.number:
                    path = self._file(number)
                    path.replace(path.with_name(path.name + ".damaged"))
            self.has_corrupt_tail = False

    @property
    def head(self) -> int:
        """The last version that was acknowledged, 0 if there is none."""
        return self.acknowledged[0]

    @property
    def acknowledged(self) -> tuple[int, str]:
        """The head and its checksum: after a rescue a number may be another version's."""
        if not self.exists():
            return 0, ""
        facts, _ = self._facts(self._working)
        return facts["version"], facts["checksum"]

    @property
    def oldest(self) -> int:
        """The first version whose file is there, 0 if there is none."""
        return min(self._files(), default=0)

    def at(self, number: int) -> State:
        """The state of one version."""
        self._check_known(number)
        return State(self._reconstruct(number).tensors, dict(self._described(number).facts))

    def versions(self) -> list[Version]:
        """Up to the first that is torn, from their headers; their tensors are checked when they
        are used."""
        found: list[Version] = []
        for number in self._numbers():
            try:
                found.append(self._described(number))
            except CorruptRecordError as error:
                if not self._file(number).exists():  # dropped since we looked
                    continue
                warnings.warn(f"{error}; it is left out, and what stands on it", stacklevel=2)
                break
        return found

    def version(self, number: int) -> Version:
        self._check_known(number)
        return self._described(number)

    def _described(self, number: int) -> Version:
        path = self._file(number)
        facts, total = self._facts(path)
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:  # dropped since its facts were read
            raise CorruptRecordError(f"'{path}' does not exist") from error
        return Version(
            facts["number"],
            _name(facts, total),
            facts["parent"],
            facts["reason"],
            facts["created"],
            size,
            facts["facts"],
            facts.get("seen", {}),
        )

    def _numbers(self) -> list[int]:
        """Of the versions that are there; those after the head were never acknowledged."""
        first, files = self._first(), self._files()
        try:
            head = self.head
        except CorruptRecordError:  # nobody knows: whoever rescues takes the newest that is whole
            head = max(files, default=0)
        return [number for number in files if first <= number <= head]

    def _files(self) -> list[int]:
        return sorted(int(p.stem) for p in (self.folder / "versions").glob("*.safetensors"))

    def _check_known(self, number: int) -> None:
        known = self._numbers()
        if number not in known:
            there = f"{known[0]} to {known[-1]}" if known else "none"
            raise InputError(f"'{self.folder}' has no version {number}; it has {there}")

    def diff(self, first: int, second: int) -> list[TensorDiff]:
        """From one version to another; 0 is before anything was learned."""
        old, new = (self.at(number) if number else State() for number in (first, second))
        return diff_states(new, old, self._base)

    # Forgetting

    def prune(self, keep: int) -> int:
        """Drop all but the last versions: the oldest that stays takes in what came before it.

        It is written first, under its old checksum's name, so that its children still follow it.
        Says how many are gone.
        """
        numbers = self._numbers()
        first = numbers[-max(1, keep) :][0] if numbers else 0
        if first > self._first():
            whole = self._reconstruct(first)
            record, _ = self._read(self._file(first))
            facts = {**record.facts, "parent": "", "stands_for": whole.checksum}
            write_record(
                self._file(first), State(compute_delta(whole.tensors, {}, self._base), facts)
            )
        gone = [number for number in self._files() if number < first]  # after a kill, again
        for number in gone:
            self._file(number).unlink()
        return len(gone)

    def _at_head(self) -> VersionTensors:
        if self._head is None:
            self._remove_temporary_files()
            if not self.exists():
                self._head = VersionTensors(0, "", {})
                return self._head
            try:
                self.resume()
            except CorruptRecordError:
                if self.recover() is None:
                    raise
        assert self._head is not None
        return self._head

    def _remove_temporary_files(self) -> None:
        """Away with what a killed writer left half-written: there is one writer at a time."""
        left = [*self.folder.glob(".*.safetensors.*")]
        for path in [*left, *(self.folder / "versions").glob(".*.safetensors.*")]:
            path.unlink()

    def _reconstruct(self, number: int) -> VersionTensors:
        """Base and versions 1 … `number`, each checked against its child's idea of it. What was
        replayed last is not read again, unless somebody has put another in its place."""
        first = self._first()
        if not first <= self._known.number <= number or self._replaced(self._known):
            self._known = VersionTensors(first - 1, "", {})
        known, parent, tensors = self._known
        for n in range(known + 1, number + 1):
            record, total = self._read(self._file(n))
            if record.facts["parent"] != parent:
                raise CorruptRecordError(f"'{self._file(n)}' does not follow the version before it")
            tensors = apply_delta(record.tensors, tensors, self._base)
            parent = _name(record.facts, total)
        self._known = VersionTensors(number, parent, tensors)
        return self._known

    def _replaced(self, known: VersionTensors) -> bool:
        """By a writer that has rescued what was before it."""
        return _name(*self._facts(self._file(known.number))) != known.checksum

    def _first(self) -> int:
        """The oldest version that needs no other: the last that stands for all before it."""
        for number in reversed(self._files()):
            try:
                if "stands_for" in self._facts(self._file(number))[0]:
                    return number
            except CorruptRecordError:  # found and said when it is read
                continue
        return 1

    # Formats

    def _read(self, path: Path) -> tuple[State, str]:
        record, total = read_record(path)
        return _upgraded(record, path), total

    def _facts(self, path: Path) -> tuple[dict[str, Any], str]:
        facts, total = read_facts(path)
        return _upgraded(State({}, facts), path).facts, total


def _name(facts: Mapping[str, Any], total: str) -> str:
    """The checksum its children know a version by, whatever it has taken in since."""
    found: str = facts.get("stands_for", total)
    return found


def _upgraded(record: State, path: Path) -> State:
    """A record of an older format as one of today's."""
    while record.facts.get("format") != FORMAT:
        found = record.facts.get("format")
        if found not in UPGRADES:
            raise InputError(f"'{path}' has format {found}; this dosapp reads format {FORMAT}")
        record = UPGRADES[found](record)
    return record
