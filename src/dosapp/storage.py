"""Files that are whole or absent, and tensors stored as what changed in them. Never pickle.

A record is one safetensors file: tensors, JSON facts in its header and a checksum over both. It
is written beside its place, flushed, and renamed into it: a reader sees the old file or the new.
"""

import errno
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dosapp.errors import BadInput


class Damaged(BadInput):
    """A record whose bytes are not the ones that were written, or are gone."""


def write_bytes(path: Path, data: bytes) -> None:
    """Atomically: temporary file, flush to disk, rename."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        _flush_folder(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error


def made(folder: Path) -> Path:
    """The folder, which is there now."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    return folder


def unwritable(path: Path, error: OSError) -> BadInput:
    if error.errno == errno.ENOSPC:
        return BadInput(f"the disk of '{path}' is full; free some space, nothing was changed")
    return BadInput(f"cannot write '{path}' ({error.strerror}); choose another place")


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """One writer per folder; the lock is the system's, so it ends with the process."""
    if folder.exists() and not os.access(folder, os.W_OK):  # an old lock could be had all the same
        raise unwritable(folder, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    try:
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise unwritable(folder, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise BadInput(
                f"'{folder}' is being written by another process; wait for it, or choose another"
            ) from error
        yield


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise BadInput(f"'{path}' does not exist") from error
    except (ValueError, OSError) as error:
        raise Damaged(f"'{path}' cannot be read as JSON ({error})") from error


@dataclass
class State:
    """Named tensors and JSON facts: what a learner is at one moment."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, without that beginning."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


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
        raise Damaged(f"'{path}' does not exist") from error
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise Damaged(f"'{path}' is torn or not a record of dosapp ({error})") from error
    if checksum(state) != header["sha256"]:
        raise Damaged(f"'{path}' was changed after it was written: its checksum does not match")
    return state, header["sha256"]


def read_facts(path: Path) -> tuple[dict[str, Any], str]:
    """The facts and the checksum a record claims to have, without reading any tensor."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
        return json.loads(header["facts"]), header["sha256"]
    except FileNotFoundError as error:
        raise Damaged(f"'{path}' does not exist") from error
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise Damaged(f"'{path}' is torn or not a record of dosapp ({error})") from error


# Changes: role/name tensors against an older set, one support per name shared by all its roles


Base = Callable[[str], Tensor | None]  # what a tensor was before anything was stored


def changes(
    new: Mapping[str, Tensor], old: Mapping[str, Tensor], base: Base = lambda key: None
) -> dict[str, Tensor]:
    """What turns `old` into `new`: a bit per entry and the new values where they differ.

    Names are `role/weight`; roles of one weight (student, teacher, scores) usually change in the
    same places and share their bits. A tensor `old` lacks is compared with the base, or with zeros;
    booleans are packed, and whatever would be smaller whole is stored whole. Of a key K, a role of
    the weight W, there is one of these, or nothing if it is as before:

        values/K    the new entries where bits/W says so, in the order of the bits; shape/K
        dense/K     all of it
        packed/K    all of it, eight booleans in a byte; shape/K

    bits/W are packed too, and shared by all values of the weight. gone/ has the names of the keys
    that `new` lacks, in UTF-8, one a line.
    """
    result: dict[str, Tensor] = {}
    groups: dict[tuple[str, torch.Size], list[str]] = {}
    for key, tensor in new.items():
        before = old.get(key)
        if (
            before is not None
            and before.shape == tensor.shape
            and not differs(before, tensor).any()
        ):
            continue
        if tensor.dtype == torch.bool:
            result[f"packed/{key}"] = _pack(tensor)
            result[f"shape/{key}"] = torch.tensor(tensor.shape)
        elif tensor.is_floating_point() and (before is None or before.shape == tensor.shape):
            groups.setdefault((_weight(key), tensor.shape), []).append(key)
        else:
            result[f"dense/{key}"] = tensor
    for (name, shape), keys in groups.items():
        moved = torch.zeros(shape, dtype=torch.bool)
        for key in keys:
            moved |= differs(new[key], _before(key, new[key], old, base))
        stored = len(keys) * int(moved.sum())  # values, against bits for each entry
        taken = f"bits/{name}" in result  # by a tensor of this name with another shape
        if taken or stored + moved.numel() / 32 >= len(keys) * moved.numel():
            result |= {f"dense/{key}": new[key] for key in keys}
            continue
        result[f"bits/{name}"] = _pack(moved)
        for key in keys:
            result[f"values/{key}"] = new[key][moved]
            result[f"shape/{key}"] = torch.tensor(shape)
    gone = sorted(set(old) - set(new))
    if gone:
        result["gone/"] = torch.tensor(list("\n".join(gone).encode()), dtype=torch.uint8)
    return result


def applied(
    changed: Mapping[str, Tensor], old: Mapping[str, Tensor], base: Base = lambda key: None
) -> dict[str, Tensor]:
    """`old` with the changes made; `applied(changes(new, old), old)` equals `new` bit for bit."""
    result = dict(old)
    if "gone/" in changed:
        for key in bytes(changed["gone/"].tolist()).decode().split("\n"):
            del result[key]
    for path, value in changed.items():
        kind, _, key = path.partition("/")
        if kind == "dense":
            result[key] = value.clone()
        elif kind == "packed":
            result[key] = _unpack(value, changed[f"shape/{key}"])
        elif kind == "values":
            moved = _unpack(changed[f"bits/{_weight(key)}"], changed[f"shape/{key}"])
            like = torch.empty(moved.shape, dtype=value.dtype)
            whole = _before(key, like, old, base).clone()
            whole[moved] = value
            result[key] = whole
    return result


def differs(a: Tensor, b: Tensor) -> Tensor:
    """Where the bits differ: 0.0 and -0.0 do, equal NaNs do not."""
    if not a.is_floating_point():
        return a != b
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.contiguous().view(bits) != b.contiguous().view(bits)


def _weight(key: str) -> str:
    """`student/x` and `method/best/x` are roles of the weight x."""
    return key.rpartition("/")[2]


def _before(key: str, like: Tensor, old: Mapping[str, Tensor], base: Base) -> Tensor:
    found = old[key] if key in old else base(key)
    return torch.zeros_like(like) if found is None else found


def _pack(mask: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1)))


def _unpack(bits: Tensor, shape: Tensor) -> Tensor:
    size = torch.Size(shape.tolist())
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=size.numel())).bool().view(size)
