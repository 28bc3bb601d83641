"""2,000 mutations of the files of a learner's folder: each is detected or harmless."""

import random
import shutil
import warnings
from pathlib import Path

import pytest

from dosapp.errors import DosappError
from dosapp.history.record import compute_checksum
from dosapp.learner.learner import Learner
from dosapp.learner.learner_folder import LearnerDescription, load_latest
from dosapp.learner.verify import find_problems
from dosapp.runtime.files import read_json
from dosapp.service.audit import Audit
from dosapp.service.tokens import Tokens
from support.pins import OLD_LEARNER

MUTATIONS = 2000
BLOCK = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory, loaded_tiny) -> Path:
    """Two versions of 0.1, one of today, and the files of a service."""
    path = Path(shutil.copytree(OLD_LEARNER, tmp_path_factory.mktemp("fuzz") / "x"))
    learner = Learner.load(path, loaded_tiny)
    learner.rename(learner.classes[0], "gnu")
    learner.save(path)
    Tokens(path).add("alice", "teach")
    Audit(path).write("renamed", "alice", {"version": 3})
    (path / "service.json").write_text('{"frozen": "by alice"}')
    return path


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Flip a bit, truncate, extend, swap two blocks, or set a block to zero."""
    first, second = (rng.randrange(max(1, len(data))) for _ in range(2))
    kind = rng.choice(["flip", "flip", "header", "truncate", "extend", "swap", "zero"])
    if kind in ("flip", "header"):
        at = first % 4096 % len(data) if kind == "header" else first
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if kind == "truncate":
        return data[:first]
    if kind == "extend":
        return data + rng.randbytes(rng.randrange(1, BLOCK))
    if kind == "zero":
        return data[:first] + bytes(len(data[first : first + BLOCK])) + data[first + BLOCK :]
    low, high = sorted((first, second))
    high = max(high, low + BLOCK)
    a, b = data[low : low + BLOCK], data[high : high + BLOCK]
    return data[:low] + b + data[low + BLOCK : high] + a + data[high + BLOCK :]


def read_all(folder: Path, learner: Learner) -> tuple[object, str]:
    """What decides about predictions: the description, and the digest of the newest state."""
    description = LearnerDescription.read(folder)
    description.learner_settings(folder, "cpu")
    state, _ = load_latest(learner.history(folder))
    return description, compute_checksum(state)


@pytest.mark.slow
def test_every_mutation_is_detected_or_harmless(folder, loaded_tiny) -> None:
    learner = Learner.load(folder, loaded_tiny)
    expected = read_all(folder, learner)
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.endswith(".lock"))
    assert len(files) == 8
    rng, messages = random.Random(0), []
    for number in range(MUTATIONS):
        path = files[number % len(files)]
        data = path.read_bytes()
        mutated = mutate(data, rng)
        path.write_bytes(mutated)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a warning is a detection
                if path.suffix == ".safetensors" or path.name == "learner.json":
                    assert read_all(folder, learner) == expected, path.name
                Audit(folder).last()
                Tokens(folder)
                read_json(folder / "service.json")
        except (DosappError, UserWarning) as error:
            messages.append(str(error))
        finally:
            path.write_bytes(data)
    assert len(messages) > MUTATIONS / 2
    assert not any("\n" in message for message in messages)
    assert read_all(folder, learner) == expected


def test_swapped_and_missing_files_are_detected(folder, loaded_tiny, tmp_path) -> None:
    names = ["working.safetensors", *(f"versions/{n:06d}.safetensors" for n in (1, 2, 3))]
    for name in names:
        for other in [*names, None]:
            if name == other:
                continue
            copy = tmp_path / "copy"
            shutil.copytree(folder, copy)
            (copy / name).unlink()
            if other is not None:
                shutil.copy(folder / other, copy / name)
            assert find_problems(copy)
            shutil.rmtree(copy)
