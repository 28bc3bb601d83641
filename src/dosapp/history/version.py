"""The two kinds of records in a learner's folder: versions and the working checkpoint.

A record with a right checksum can still come from elsewhere, so what it says is checked too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dosapp.errors import CorruptRecordError, InputError
from dosapp.history.record import State, read_facts, read_record

FORMAT = 1
UPGRADES: dict[int, Callable[[State], State]] = {}  # a record of format n → one of format n + 1
VERSION_FACTS = {"number": int, "parent": str, "reason": str, "created": str, "facts": dict}
CHECKPOINT_FACTS = {"version": int, "checksum": str, "state": dict, "working": dict}
OPTIONAL_FACTS = {"seen": dict, "stands_for": str}


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


class VersionTensors(NamedTuple):
    """The tensors of a version, reconstructed from all before it; 0 is before any training."""

    number: int
    checksum: str
    tensors: dict[str, Tensor]


def read_version(path: Path) -> tuple[State, str]:
    """Read the record of a version; its checksum is returned with it."""
    return _check(path, *read_record(path), VERSION_FACTS)


def read_version_facts(path: Path) -> tuple[dict[str, Any], str]:
    """The facts of a version, and its recorded checksum."""
    facts, checksum = read_facts(path)
    return _check(path, State({}, facts), checksum, VERSION_FACTS)[0].facts, checksum


def read_checkpoint(path: Path) -> tuple[State, str]:
    """Read the working checkpoint; its checksum is returned with it."""
    return _check(path, *read_record(path), CHECKPOINT_FACTS)


def read_checkpoint_facts(path: Path) -> tuple[dict[str, Any], str]:
    """The facts of the working checkpoint, and its recorded checksum."""
    facts, checksum = read_facts(path)
    return _check(path, State({}, facts), checksum, CHECKPOINT_FACTS)[0].facts, checksum


def _check(
    path: Path, record: State, checksum: str, kinds: Mapping[str, type]
) -> tuple[State, str]:
    """Convert a record of an older format, and check its facts."""
    record = _upgrade(record, path)
    facts = record.facts
    given = {name: kind for name, kind in OPTIONAL_FACTS.items() if name in facts}
    for name, kind in {**kinds, **given}.items():
        if not isinstance(facts.get(name), kind):
            raise CorruptRecordError(f"'{path}' has no valid '{name}': no record of a learner")
    number = facts["number" if "number" in kinds else "version"]
    if number < 0 or ("number" in kinds and path.stem != f"{number:06d}"):
        raise CorruptRecordError(f"'{path}' says that it is version {number}; it was moved here")
    return record, checksum


def version_checksum(facts: Mapping[str, Any], checksum: str) -> str:
    """The checksum by which its children know a version, also after pruning."""
    known: str = facts.get("stands_for", checksum)
    return known


def _upgrade(record: State, path: Path) -> State:
    """Convert a record of an older format."""
    while record.facts.get("format") != FORMAT:
        version = record.facts.get("format")
        if not isinstance(version, int) or version not in UPGRADES:
            raise InputError(f"'{path}' has format {version}; this dosapp reads format {FORMAT}")
        record = UPGRADES[version](record)
    return record
