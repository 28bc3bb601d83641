"""The folder of a learner: a chain of versions, and the working checkpoint at its end.

    versions/000001.safetensors   the change since the parent, with checksum, parent and reason
    working.safetensors           the change since the last version, and what only the next step
                                  needs (optimizer, replay buffer, position); replaced atomically

The working checkpoint names the version it continues from, so it defines the head: a version
written after it was never acknowledged and is written again. Resumed runs, saved learners and
services read this folder with this code.
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
from dosapp.history.delta import BaseTensor, apply_delta, compute_delta
from dosapp.history.record import State, read_facts, read_record, write_record

FORMAT = 1
UPGRADES: dict[int, Callable[[State], State]] = {}  # a record of format n → one of format n + 1


@dataclass(frozen=True)
class Version:
    """The description of one version."""

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
    """How far a tensor is from another version of it."""

    name: str  # role/weight
    entries: int  # that differ
    of: int
    distance: float  # L2
    largest: float  # of an entry


def diff_states(new: State, old: State, base: BaseTensor) -> list[TensorDiff]:
    """The tensors in which two states differ, largest distance first."""
    diffs = []
    for name in {**new.tensors, **old.tensors}:
        after, before = (state.tensors.get(name, base(name)) for state in (new, old))
        like = before if after is None else after
        assert like is not None  # one of the states has it
        now, then = (torch.zeros_like(like) if t is None else t for t in (after, before))
        if now.shape != then.shape:  # every entry counts as changed
            now, then = now.double(), torch.zeros_like(now, dtype=torch.float64)
        differs = bits_differ(now, then)
        if differs.any():
            gap = (now.double() - then.double())[differs]
            distance, largest = float(gap.norm()), float(gap.abs().max())
            diffs.append(TensorDiff(name, int(differs.sum()), now.numel(), distance, largest))
    return sorted(diffs, key=lambda diff: -diff.distance)


class VersionTensors(NamedTuple):
    """The tensors of a version, reconstructed from all before it; 0 is before any training."""

    number: int
    checksum: str
    tensors: dict[str, Tensor]


class History:
    """Versions and working checkpoint in a folder. There is one writer at a time.

    Args:
        folder: The folder of a learner.
        base: Gives the tensors of a state before any training, by key.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> history = History(Path(tempfile.mkdtemp()), lambda key: None)
        >>> history.append(State({"student/w": torch.ones(2)}), State(), "first")
        1
    """

    def __init__(self, folder: Path, base: BaseTensor) -> None:
        self.folder, self._base = folder, base
        self._head: VersionTensors | None = None
        self._last_read = VersionTensors(0, "", {})
        self.has_corrupt_tail = False  # a file after the head cannot be read

    @property
    def _working_path(self) -> Path:
        return self.folder / "working.safetensors"

    def _version_path(self, number: int) -> Path:
        return self.folder / "versions" / f"{number:06d}.safetensors"

    def exists(self) -> bool:
        """Whether anything was ever written here, even if the checkpoint is missing."""
        return self._working_path.exists() or bool(self._version_numbers())

    # Writing

    def append(
        self,
        state: State,
        working: State,
        reason: str,
        measured: Mapping[str, Any] | None = None,
    ) -> int:
        """Append a version and the checkpoint that acknowledges it.

        Args:
            state: Everything that decides what the learner predicts and how it continues.
            working: What only the next training step needs.
            reason: Why there is a new version.
            measured: Values to store in the version's description.

        Returns:
            The number of the version.

        Raises:
            StorageError: Nothing was acknowledged; the head is the version before.
        """
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
                "seen": dict(measured or {}),
            },
        )
        checksum = write_record(self._version_path(number + 1), record)
        self._head = VersionTensors(number + 1, checksum, state.clone().tensors)
        self.checkpoint(state, working)
        return number + 1

    def checkpoint(self, state: State, working: State) -> None:
        """Replace the working checkpoint, without a new version."""
        number, checksum, tensors = self._at_head()
        self._quarantine()
        delta = compute_delta(state.tensors, tensors, self._base)
        record = State(
            {f"state/{k}": t for k, t in delta.items()}
            | {f"working/{k}": t for k, t in working.tensors.items()},
            {
                "format": FORMAT,
                "version": number,
                "checksum": checksum,
                "state": state.facts,
                "working": working.facts,
            },
            working.private,
        )
        try:
            write_record(self._working_path, record)
        except BaseException:
            self._head = None  # a version that was not acknowledged is not continued
            raise

    def prune(self, keep: int) -> int:
        """Delete all but the last versions.

        The oldest version that stays is first rewritten to hold all changes before it. It keeps its
        checksum as a name, so that its children still follow it.

        Args:
            keep: How many versions stay, at least 1.

        Returns:
            The number of deleted versions.
        """
        numbers = self._acknowledged_numbers()
        first = numbers[-max(1, keep) :][0] if numbers else 0
        if first > self._first_standalone():
            version = self._reconstruct(first)
            record, _ = self._read(self._version_path(first))
            facts = {**record.facts, "parent": "", "stands_for": version.checksum}
            delta = compute_delta(version.tensors, {}, self._base)
            write_record(self._version_path(first), State(delta, facts))
        deleted = [number for number in self._version_numbers() if number < first]
        for number in deleted:
            self._version_path(number).unlink()
        return len(deleted)

    def reset(self) -> None:
        """Quarantine all versions and start again from none."""
        self._head, self.has_corrupt_tail = VersionTensors(0, "", {}), True
        self._quarantine()

    def _quarantine(self) -> None:
        """Rename versions after a recovered head to `*.damaged`; nothing is deleted."""
        if self.has_corrupt_tail and self._head is not None:
            for number in self._version_numbers():
                if number > self._head.number:
                    path = self._version_path(number)
                    path.replace(path.with_name(path.name + ".damaged"))
            self.has_corrupt_tail = False

    # Reading

    def resume(self) -> tuple[State, State]:
        """The state and the working state exactly as they were at the last checkpoint."""
        record, _ = self._read(self._working_path)
        head = self._reconstruct(record.facts["version"])
        if head.checksum != record.facts["checksum"]:
            raise CorruptRecordError(
                f"'{self._working_path}' continues from a version {head.number} that was replaced"
            )
        self._head = head
        delta = select_prefix("state/", record.tensors)
        tensors = apply_delta(delta, head.tensors, self._base)
        working = State(select_prefix("working/", record.tensors), record.facts["working"])
        return State(tensors, record.facts["state"]), working

    def recover(self) -> tuple[int, State] | None:
        """Find the newest version that can be read with all before it, when `resume` fails.

        Returns:
            Its number and state, or None. Files after it are quarantined by the next write.
        """
        number = self._first_standalone() - 1
        while True:
            try:
                self._reconstruct(number + 1)
                number += 1
            except DosappError:
                break
        if number < self._first_standalone():
            return None
        self._head, self.has_corrupt_tail = self._reconstruct(number), True
        return number, State(self._head.tensors, dict(self._describe(number).facts))

    @property
    def head(self) -> int:
        """The number of the last acknowledged version, 0 if there is none."""
        return self.head_id[0]

    @property
    def head_id(self) -> tuple[int, str]:
        """Number and checksum of the head: after a recovery a number can be reused."""
        if not self.exists():
            return 0, ""
        facts, _ = self._read_facts(self._working_path)
        return facts["version"], facts["checksum"]

    @property
    def oldest(self) -> int:
        """The number of the oldest version on disk, 0 if there is none."""
        return min(self._version_numbers(), default=0)

    def at(self, number: int) -> State:
        """The state of a version."""
        facts = dict(self.version(number).facts)
        return State(self._reconstruct(number).tensors, facts)

    def versions(self) -> list[Version]:
        """Descriptions of all versions up to the first corrupt one; tensors are not read."""
        versions: list[Version] = []
        for number in self._acknowledged_numbers():
            try:
                versions.append(self._describe(number))
            except CorruptRecordError as error:
                if not self._version_path(number).exists():  # pruned by another process meanwhile
                    continue
                warnings.warn(f"{error}; it and all versions after it are skipped", stacklevel=2)
                break
        return versions

    def version(self, number: int) -> Version:
        """The description of one version."""
        self._check_number(number)
        try:
            return self._describe(number)
        except CorruptRecordError:
            self._check_number(number)  # pruned by another process meanwhile
            raise

    def diff(self, first: int, second: int) -> list[TensorDiff]:
        """What changed from one version to another; 0 is before any training."""
        old, new = (self.at(number) if number else State() for number in (first, second))
        return diff_states(new, old, self._base)

    def _describe(self, number: int) -> Version:
        path = self._version_path(number)
        facts, checksum = self._read_facts(path)
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:  # pruned since its facts were read
            raise CorruptRecordError(f"'{path}' does not exist") from error
        return Version(
            facts["number"],
            _version_checksum(facts, checksum),
            facts["parent"],
            facts["reason"],
            facts["created"],
            size,
            facts["facts"],
            facts.get("seen", {}),
        )

    def _version_numbers(self) -> list[int]:
        """Of all version files."""
        return sorted(int(p.stem) for p in (self.folder / "versions").glob("*.safetensors"))

    def _acknowledged_numbers(self) -> list[int]:
        """Of the versions up to the head."""
        first, numbers = self._first_standalone(), self._version_numbers()
        try:
            head = self.head
        except CorruptRecordError:  # `recover` will take the newest version that can be read
            head = max(numbers, default=0)
        return [number for number in numbers if first <= number <= head]

    def _check_number(self, number: int) -> None:
        numbers = self._acknowledged_numbers()
        if number not in numbers:
            known = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
            raise InputError(f"'{self.folder}' has no version {number}; it has {known}")

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
        """Delete what a killed writer left half-written."""
        for folder in (self.folder, self.folder / "versions"):
            for path in folder.glob(".*.safetensors.*"):
                path.unlink()

    def _reconstruct(self, number: int) -> VersionTensors:
        """Apply versions 1 … `number` to the base; each must name its parent's checksum.

        The last result is reused unless its file was replaced.
        """
        first = self._first_standalone()
        last = self._last_read
        if not first <= last.number <= number or self._was_replaced(last):
            last = VersionTensors(first - 1, "", {})
        _, parent, tensors = last
        for n in range(last.number + 1, number + 1):
            record, checksum = self._read(self._version_path(n))
            if record.facts["parent"] != parent:
                raise CorruptRecordError(
                    f"'{self._version_path(n)}' does not follow the version before it"
                )
            tensors = apply_delta(record.tensors, tensors, self._base)
            parent = _version_checksum(record.facts, checksum)
        self._last_read = VersionTensors(number, parent, tensors)
        return self._last_read

    def _was_replaced(self, version: VersionTensors) -> bool:
        """By a writer that has recovered an earlier head."""
        facts, checksum = self._read_facts(self._version_path(version.number))
        return _version_checksum(facts, checksum) != version.checksum

    def _first_standalone(self) -> int:
        """The newest version that holds all changes before it; 1 if none was pruned."""
        for number in reversed(self._version_numbers()):
            try:
                if "stands_for" in self._read_facts(self._version_path(number))[0]:
                    return number
            except CorruptRecordError:  # reported when it is read
                continue
        return 1

    # Formats

    def _read(self, path: Path) -> tuple[State, str]:
        record, checksum = read_record(path)
        return _upgrade(record, path), checksum

    def _read_facts(self, path: Path) -> tuple[dict[str, Any], str]:
        facts, checksum = read_facts(path)
        return _upgrade(State({}, facts), path).facts, checksum


def _version_checksum(facts: Mapping[str, Any], checksum: str) -> str:
    """The checksum by which its children know a version, also after pruning."""
    known: str = facts.get("stands_for", checksum)
    return known


def _upgrade(record: State, path: Path) -> State:
    """Convert a record of an older format."""
    while record.facts.get("format") != FORMAT:
        version = record.facts.get("format")
        if version not in UPGRADES:
            raise InputError(f"'{path}' has format {version}; this dosapp reads format {FORMAT}")
        record = UPGRADES[version](record)
    return record
