"""A record: one safetensors file with tensors, JSON facts in its header and a checksum over both.

Nothing is pickled, so reading a record cannot execute code.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dosapp.errors import CorruptRecordError, StorageError
from dosapp.runtime.files import write_bytes


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
    header = {"facts": json.dumps(state.facts), "sha256": checksum}
    write_bytes(path, save(tensors, header), state.private)
    return checksum


def read_record(path: Path) -> tuple[State, str]:
    """Read a record and verify its checksum, which is returned with it."""
    facts, checksum, tensors = _read_file(path, with_tensors=True)
    state = State(tensors, facts)
    if compute_checksum(state) != checksum:
        raise CorruptRecordError(
            f"'{path}' was changed after it was written: its checksum does not match"
        )
    return state, checksum


def read_facts(path: Path) -> tuple[dict[str, Any], str]:
    """The facts of a record and its recorded checksum, without reading any tensor."""
    facts, checksum, _ = _read_file(path, with_tensors=False)
    return facts, checksum


def _read_file(path: Path, with_tensors: bool) -> tuple[dict[str, Any], str, dict[str, Tensor]]:
    if path.exists() and not os.access(path, os.R_OK):  # intact, but of another user
        raise StorageError(f"'{path}' cannot be read by this user; ask its owner for access")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            names = file.keys() if with_tensors else ()
            tensors = {name: file.get_tensor(name) for name in names}
        return json.loads(header["facts"]), header["sha256"], tensors
    except FileNotFoundError as error:
        raise CorruptRecordError(f"'{path}' does not exist") from error
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise CorruptRecordError(f"'{path}' is torn or not a record of dosapp ({error})") from error
