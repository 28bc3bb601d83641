"""The folder of a learner: a chain of versions, and the working checkpoint at its end.

    versions/000001.safetensors   the change since the parent, with checksum, parent and reason
    working.safetensors           the change since the last version, and what only the next step
                                  needs (optimizer, replay buffer, position); replaced atomically

The working checkpoint names the version it continues from, so it defines the head: a version
written after it was never acknowledged and is written again. Resumed runs, saved learners and
services read this folder with this code.
"""

import datetime
import logging
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from dosapp.errors import CorruptRecordError, DosappError, InputError, StorageError
from dosapp.functional.named_tensors import select_prefix
from dosapp.history.delta import BaseTensor, apply_delta, compute_delta
from dosapp.history.diff import TensorDiff, diff_states
from dosapp.history.record import State, compute_checksum, write_record
from dosapp.history.version import (
    FORMAT,
    Version,
    VersionTensors,
    read_checkpoint,
    read_checkpoint_facts,
    read_version,
    read_version_facts,
    version_checksum,
)
from dosapp.runtime.files import (
    FolderLock,
    file_stamp,
    is_link,
    is_private,
    list_names,
    remove_file,
    remove_temporary_files,
    rename_file,
)

logger = logging.getLogger("dosapp.history")

VERSION_NAME = re.compile(r"\d{6,}\.safetensors")


class History:
    """Versions and working checkpoint in a folder. There is one writer at a time.

    Args:
        folder: The folder of a learner.
        base: Gives the tensors of a state before any training, by key.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from pathlib import Path
        >>> history = History(Path(tempfile.mkdtemp()), lambda key: None)
        >>> history.append(State({"student/w": torch.ones(2)}), State(), "first")
        1
    """

    def __init__(self, folder: Path, base: BaseTensor) -> None:
        self.folder, self._base = folder, base
        self._head: VersionTensors | None = None
        self._last_read = VersionTensors(0, "", {})
        self._disk_head: tuple[int, str] | None = None  # as last read or written, if it was
        self._lock: FolderLock | None = None
        self.has_corrupt_tail = False  # a file after the head cannot be read

    @property
    def _working_path(self) -> Path:
        return self.folder / "working.safetensors"

    def _version_path(self, number: int) -> Path:
        return self.folder / "versions" / f"{number:06d}.safetensors"

    def exists(self) -> bool:
        """Whether anything was ever written here, even if the checkpoint is missing."""
        return self._working_path.name in list_names(self.folder) or bool(self._version_numbers())

    # Writing

    def begin_writing(self, lock: FolderLock) -> None:
        """Check this lock before each commit from now on; remove what killed writers left."""
        self._lock = lock
        for folder in (self.folder, self.folder / "versions"):
            remove_temporary_files(folder)

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
        self._check_writer()
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
            state.private,
        )
        checksum = write_record(self._version_path(number + 1), record)
        head = VersionTensors(number + 1, checksum, state.clone().tensors)
        self._check_writer()  # again, because a large version takes a while
        self._commit(head, state, working)
        return number + 1

    def checkpoint(self, state: State, working: State) -> None:
        """Replace the working checkpoint, without a new version."""
        head = self._at_head()
        self._check_writer()
        self._quarantine()
        self._commit(head, state, working)

    def _commit(self, head: VersionTensors, state: State, working: State) -> None:
        """Write the checkpoint that acknowledges a version."""
        delta = compute_delta(state.tensors, head.tensors, self._base)
        record = State(
            {f"state/{k}": t for k, t in delta.items()}
            | {f"working/{k}": t for k, t in working.tensors.items()},
            {
                "format": FORMAT,
                "version": head.number,
                "checksum": head.checksum,
                "state": state.facts,
                "working": working.facts,
            },
            working.private or state.private,
        )
        try:
            write_record(self._working_path, record)
        except StorageError as error:
            self._head = None  # a version that was not acknowledged is not continued
            if not self._is_on_disk(record):
                raise
            # It was renamed, then flushing the folder failed: a restart would find it.
            logger.warning("version %d is written, but see to the disk: %s", head.number, error)
        except BaseException:
            self._head = None
            raise
        self._head, self._disk_head = head, (head.number, head.checksum)

    def _is_on_disk(self, record: State) -> bool:
        """Whether the checkpoint on disk is this one."""
        try:
            return read_checkpoint_facts(self._working_path)[1] == compute_checksum(record)
        except (CorruptRecordError, StorageError):
            return False

    def _check_writer(self) -> None:
        """Raise a `StorageError` if another process may have written since the head was read."""
        if self._lock is not None:
            self._lock.check()
        if is_link(self.folder / "versions"):
            raise StorageError(
                f"'{self.folder / 'versions'}' was replaced by a symbolic link, which dosapp does "
                "not follow; nothing was changed, put the folder back"
            )
        try:
            head = self.head_id
        except CorruptRecordError:  # nothing there that a commit could lose
            return
        if self._disk_head is not None and head != self._disk_head:
            raise StorageError(
                f"'{self.folder}' was written by another process, which made version {head[0]}; "
                "nothing was changed, restart this process"
            )

    def prune(self, keep: int) -> int:
        """Delete all but the last versions.

        The oldest version that stays is first rewritten to hold all changes before it. It keeps its
        checksum as a name, so that its children still follow it.

        Args:
            keep: How many versions stay, at least 1.

        Returns:
            The number of deleted versions.
        """
        self._check_writer()
        numbers = self._acknowledged_numbers()
        first = numbers[-max(1, keep) :][0] if numbers else 0
        if first > self._first_standalone():
            version = self._reconstruct(first)
            record, _ = read_version(self._version_path(first))
            facts = {**record.facts, "parent": "", "stands_for": version.checksum}
            delta = compute_delta(version.tensors, {}, self._base)
            path = self._version_path(first)
            write_record(path, State(delta, facts, is_private(path)))
        deleted = [number for number in self._version_numbers() if number < first]
        for number in deleted:
            remove_file(self._version_path(number))
        return len(deleted)

    def reset(self) -> None:
        """Quarantine all versions and start again from none."""
        self._head, self.has_corrupt_tail = VersionTensors(0, "", {}), True
        self._disk_head = self._read_disk_head()
        self._quarantine()

    def _quarantine(self) -> None:
        """Rename versions after a recovered head to `*.damaged`; nothing is deleted."""
        if self.has_corrupt_tail and self._head is not None:
            for number in self._version_numbers():
                if number > self._head.number:
                    path = self._version_path(number)
                    rename_file(path, path.with_name(path.name + ".damaged"))
            self.has_corrupt_tail = False

    # Reading

    def resume(self) -> tuple[State, State]:
        """The state and the working state exactly as they were at the last checkpoint."""
        record, _ = read_checkpoint(self._working_path)
        head = self._reconstruct(record.facts["version"])
        if head.checksum != record.facts["checksum"]:
            raise CorruptRecordError(
                f"'{self._working_path}' continues from a version {head.number} that was replaced"
            )
        self._head, self._disk_head = head, (head.number, head.checksum)
        delta = select_prefix("state/", record.tensors)
        tensors = self._apply(delta, head.tensors, self._working_path)
        working = State(select_prefix("working/", record.tensors), record.facts["working"])
        return State(tensors, record.facts["state"]), working

    def recover(self) -> tuple[int, State] | None:
        """Find the newest version that can be read with all before it, when `resume` fails.

        Returns:
            Its number and state, or None. Files after it are quarantined by the next write.

        Raises:
            StorageError: A file cannot be read now. It may be intact, so nothing is quarantined.
        """
        number = self._first_standalone() - 1
        while True:
            try:
                self._reconstruct(number + 1)
                number += 1
            except CorruptRecordError:
                break
        if number < self._first_standalone():
            return None
        self._head, self.has_corrupt_tail = self._reconstruct(number), True
        self._disk_head = self._read_disk_head()
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
        facts, _ = read_checkpoint_facts(self._working_path)
        return facts["version"], facts["checksum"]

    def _read_disk_head(self) -> tuple[int, str] | None:
        """The head by the checkpoint on disk; None if it cannot be read."""
        try:
            return self.head_id
        except CorruptRecordError:
            return None

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

    def latest(self) -> Version | None:
        """The version that the next one will follow: the newest that can be read, if any."""
        number = self._at_head().number
        return self._describe(number) if number else None

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
        facts, checksum = read_version_facts(path)
        stamp = file_stamp(path)
        if stamp is None:  # pruned since its facts were read
            raise CorruptRecordError(f"'{path}' does not exist")
        return Version(
            facts["number"],
            version_checksum(facts, checksum),
            facts["parent"],
            facts["reason"],
            facts["created"],
            stamp[1],
            facts["facts"],
            facts.get("seen", {}),
        )

    def find_problems(self, check: Callable[[Mapping[str, Tensor], Path], None]) -> list[str]:
        """Read every version and the checkpoint, and return a sentence for each that is damaged.

        Args:
            check: Raises if the tensors of a version, in a file, cannot be used.
        """
        problems: list[str] = []

        def attempt(read: Callable[[], object]) -> bool:
            try:
                read()
            except DosappError as error:
                if str(error) not in problems:
                    problems.append(str(error))
                return False
            return True

        def check_version(number: int) -> None:
            check(self._reconstruct(number).tensors, self._version_path(number))

        def check_checkpoint() -> None:
            check(self.resume()[0].tensors, self._working_path)

        for number in self._acknowledged_numbers():
            if not attempt(partial(check_version, number)):  # perhaps because of one before it
                attempt(partial(read_version, self._version_path(number)))
        attempt(check_checkpoint)
        return problems

    def numbers_up_to(self, head: int) -> list[int]:
        """The versions that a head rests on, as far as they are there."""
        first = self._first_standalone()
        return [number for number in self._version_numbers() if first <= number <= head]

    def _version_numbers(self) -> list[int]:
        """Of all version files."""
        names = list_names(self.folder / "versions")
        return sorted(int(name[:-12]) for name in names if VERSION_NAME.fullmatch(name))

    def _acknowledged_numbers(self) -> list[int]:
        """Of the versions up to the head."""
        found = self._read_disk_head()
        # Without one, `recover` will take the newest version that can be read.
        return self.numbers_up_to(
            max(self._version_numbers(), default=0) if not found else found[0]
        )

    def _check_number(self, number: int) -> None:
        numbers = self._acknowledged_numbers()
        if number not in numbers:
            known = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
            raise InputError(f"'{self.folder}' has no version {number}; it has {known}")

    def _at_head(self) -> VersionTensors:
        if self._head is None:
            if not self.exists():
                self._head, self._disk_head = VersionTensors(0, "", {}), (0, "")
                return self._head
            try:
                self.resume()
            except CorruptRecordError:
                if self.recover() is None:
                    raise
        assert self._head is not None
        return self._head

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
            path = self._version_path(n)
            record, checksum = read_version(path)
            if record.facts["parent"] != parent:
                raise CorruptRecordError(f"'{path}' does not follow the version before it")
            tensors = self._apply(record.tensors, tensors, path)
            parent = version_checksum(record.facts, checksum)
        self._last_read = VersionTensors(number, parent, tensors)
        return self._last_read

    def _was_replaced(self, version: VersionTensors) -> bool:
        """By a writer that has recovered an earlier head."""
        facts, checksum = read_version_facts(self._version_path(version.number))
        return version_checksum(facts, checksum) != version.checksum

    def _first_standalone(self) -> int:
        """The newest version that holds all changes before it; else the oldest one."""
        numbers = self._version_numbers()
        for number in reversed(numbers):
            try:
                if "stands_for" in read_version_facts(self._version_path(number))[0]:
                    return number
            except CorruptRecordError:  # reported when it is read
                continue
        return min(numbers, default=1)

    def _apply(
        self, delta: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: Path
    ) -> dict[str, Tensor]:
        """Apply the delta of a file, whose content is not trusted."""
        try:
            return apply_delta(delta, tensors, self._base)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CorruptRecordError(
                f"'{path}' holds a change that does not fit the version before it ({error})"
            ) from error
        except MemoryError as error:
            raise StorageError(f"there is not enough memory to read '{path}'; free some") from error
