"""A record: one safetensors file with tensors, JSON facts in its header and a checksum over both.

Nothing is pickled, so reading a record cannot execute code.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dosapp.errors import CorruptRecordError, StorageError
from dosapp.runtime.files import read_start, write_bytes

MAX_HEADER = 100_000_000  # bytes, the limit of safetensors
HEADER_GUESS = 1 << 16  # bytes, enough for most headers


@dataclass
class State:
    """Named tensors and JSON facts: a learner at one moment."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    private: bool = False  # holds images, so that its file is for the owner only

    def clone(self) -> "State":
        """A copy that later training steps do not change."""
        tensors = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        return State(tensors, self.facts, self.private)


def compute_checksum(state: State) -> str:
    """SHA-256 of facts, names, types, shapes and bytes."""
    digest = hashlib.sha256(json.dumps(state.facts, sort_keys=True).encode())
    for name, tensor in sorted(state.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_record(path: Path, state: State) -> str:
    """Write a record atomically and return its checksum."""
    checksum = compute_checksum(state)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    facts = json.dumps(state.facts)
    header = {"facts": facts, "sha256": checksum, "facts_sha256": _hash_text(facts)}
    write_bytes(path, save(tensors, header), state.private)
    return checksum


def read_record(path: Path) -> tuple[State, str]:
    """Read a record and verify its checksum, which is returned with it.

    Raises:
        CorruptRecordError: It is missing, torn or changed.
        StorageError: It cannot be read now; it may be intact.
    """
    data, size = _read(path)
    facts, checksum = _read_header(path, data, size)
    try:
        state = State(load(data), facts)
        is_intact = compute_checksum(state) == checksum
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise _torn_error(path, error) from error
    except MemoryError as error:
        raise StorageError(f"there is not enough memory to read '{path}'; free some") from error
    if not is_intact:
        raise _checksum_error(path)
    return state, checksum


def read_facts(path: Path) -> tuple[dict[str, Any], str]:
    """The facts of a record and its recorded checksum, without reading any tensor."""
    limit = HEADER_GUESS
    while True:
        data, size = _read(path, limit)
        limit = 8 + int.from_bytes(data[:8], "little")
        if limit <= len(data) or len(data) == size:
            return _read_header(path, data, size)
        if limit > MAX_HEADER:
            raise _torn_error(path, f"its header would have {limit} bytes")


def _read(path: Path, limit: int | None = None) -> tuple[bytes, int]:
    try:
        return read_start(path, limit)
    except FileNotFoundError as error:
        raise CorruptRecordError(f"'{path}' does not exist") from error


def _read_header(path: Path, data: bytes, size: int) -> tuple[dict[str, Any], str]:
    """Facts and recorded checksum, from the first bytes of a safetensors file of some size."""
    try:
        first = 8 + int.from_bytes(data[:8], "little")  # where the tensors begin
        tensors = json.loads(data[8:first])
        header = tensors.pop("__metadata__")
        if size != first + max((t["data_offsets"][1] for t in tensors.values()), default=0):
            raise ValueError(f"it has {size} bytes")
        text, checksum = header["facts"], header["sha256"]
        # Records of before 0.3 have no checksum of the facts alone.
        is_intact = header.get("facts_sha256", _hash_text(text)) == _hash_text(text)
        facts = json.loads(text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _torn_error(path, error) from error
    if not is_intact:
        raise _checksum_error(path)
    if not isinstance(facts, dict) or not isinstance(checksum, str):
        raise _torn_error(path, "its facts are not an object")
    return facts, checksum


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _torn_error(path: Path, reason: object) -> CorruptRecordError:
    return CorruptRecordError(f"'{path}' is torn or not a record of dosapp ({reason})")


def _checksum_error(path: Path) -> CorruptRecordError:
    return CorruptRecordError(
        f"'{path}' was changed after it was written: its checksum does not match"
    )
