"""A record: one safetensors file with tensors, JSON facts in its header and a checksum over both.

It is written beside its place, flushed, and renamed into it: a reader sees the old file or the new.
Never pickle.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dosapp.errors import CorruptRecordError
from dosapp.runtime.files import write_bytes


@dataclass
class State:
    """Named tensors and JSON facts: what a learner is at one moment."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def checksum(state: State) -> str:
    digest = hashlib.sha256(json.dumps(state.facts, sort_keys=True).encode())
    for name, tensor in sorted(state.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_record(path: Path, state: State) -> str:
    """Write and return the checksum."""
    total = checksum(state)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    header = {"facts": json.dumps(state.facts), "sha256": total}
    write_bytes(path, save(tensors, header))
    return total


def read_record(path: Path) -> tuple[State, str]:
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        state = State(tensors, json.loads(header["facts"]))
    except FileNotFoundError as error:
        raise CorruptRecordError(f"'{path}' does not exist") from error
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise CorruptRecordError(f"'{path}' is torn or not a record of dosapp ({error})") from error
    if checksum(state) != header["sha256"]:
        raise CorruptRecordError(
            f"'{path}' was changed after it was written: its checksum does not match"
        )
    return state, header["sha256"]


def read_facts(path: Path) -> tuple[dict[str, Any], str]:
    """The facts and the checksum a record claims to have, without reading any tensor."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
        return json.loads(header["facts"]), header["sha256"]
    except FileNotFoundError as error:
        raise CorruptRecordError(f"'{path}' does not exist") from error
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise CorruptRecordError(f"'{path}' is torn or not a record of dosapp ({error})") from error
