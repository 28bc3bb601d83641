"""Records with right checksums and wrong content: one sentence each, and no NaN is served."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dosapp.backbones.dual_encoder import DualEncoder
from dosapp.errors import CorruptRecordError, DosappError
from dosapp.history.history import History
from dosapp.history.record import State, read_facts, read_record, write_record
from dosapp.learner.learner import Learner
from support.pins import OLD_LEARNER

DEEP = json.loads('{"a":' * 900 + "1" + "}" * 900)


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(OLD_LEARNER, tmp_path / "old"))


def rewrite(path: Path, change: Callable[[State], None]) -> None:
    """Change a record and give it a right checksum."""
    record, _ = read_record(path)
    change(record)
    write_record(path, record)


def set_tensor(prefix: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def change(record: State) -> None:
        name = next(n for n in record.tensors if n.startswith(prefix))
        record.tensors[name] = value(record.tensors[name])

    return change


def set_fact(name: str, value: object) -> Any:
    return lambda record: record.facts.__setitem__(name, value)


def add_tensor(name: str, tensor: torch.Tensor) -> Any:
    return lambda record: record.tensors.__setitem__(name, tensor)


def check_detected(folder: Path, backbone: DualEncoder) -> None:
    """One sentence: an error, or a warning that an earlier version is used."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((DosappError, UserWarning)) as caught:
            Learner.load(folder, backbone)
    assert "\n" not in str(caught.value)


VERSION = {
    "no parent": lambda record: record.facts.pop("parent"),
    "no facts": lambda record: record.facts.pop("facts"),
    "another number": set_fact("number", 7),
    "a number that is text": set_fact("number", "1"),
    "format of lists": set_fact("format", []),
    "seen is a list": set_fact("seen", [1]),
    "huge shape": set_tensor("shape/", lambda t: torch.tensor([1 << 40, 1 << 40])),
    "negative shape": set_tensor("shape/", lambda t: -t),
    "shape that is no vector": set_tensor("shape/", lambda t: torch.tensor(3)),
    "no bits": lambda r: [r.tensors.pop(n) for n in list(r.tensors) if n.startswith("bits/")],
    "fewer values": set_tensor("values/", lambda t: t[:1]),
    "values of another type": set_tensor("values/", lambda t: t.double()),
    "gone that was never there": add_tensor("gone/", torch.tensor([1, 2], dtype=torch.uint8)),
    "gone that is no text": add_tensor("gone/", torch.tensor([255, 254], dtype=torch.uint8)),
}


@pytest.mark.parametrize("name", VERSION)
def test_a_version_of_wrong_content_is_corrupt(name, folder, loaded_tiny) -> None:
    rewrite(folder / "versions" / "000001.safetensors", VERSION[name])
    check_detected(folder, loaded_tiny)


WORKING = {
    "no version": lambda record: record.facts.pop("version"),
    "negative version": set_fact("version", -1),
    "state is a list": set_fact("state", []),
    "no classes": lambda record: record.facts["state"].pop("classes"),
    "classes are numbers": lambda record: record.facts["state"].update(classes=[1, 2]),
    "no prompts": lambda record: record.facts["state"].pop("prompts"),
    "sessions is text": lambda record: record.facts["state"].update(sessions="many"),
    "nested too deep": lambda record: record.facts["state"].update(classes=DEEP),
    "unknown role": add_tensor("state/dense/bogus/x", torch.zeros(3)),
    "unknown weight": add_tensor("state/dense/student/bogus.weight", torch.zeros(3)),
    "a weight of another shape": add_tensor("state/dense/student/logit_scale", torch.zeros(3)),
    "NaN": add_tensor("state/dense/student/logit_scale", torch.tensor(float("nan"))),
    "infinite": add_tensor("state/dense/teacher/logit_scale", torch.tensor(float("inf"))),
    "optimizer of another weight": add_tensor("working/optimizer/bogus/exp_avg", torch.zeros(1)),
}


@pytest.mark.parametrize("name", WORKING)
def test_a_checkpoint_of_wrong_content_is_not_used(name, folder, loaded_tiny) -> None:
    rewrite(folder / "working.safetensors", WORKING[name])
    check_detected(folder, loaded_tiny)


def test_facts_nested_beyond_what_can_be_parsed_are_corrupt(tmp_path) -> None:
    write_record(tmp_path / "x.safetensors", State({}, {"a": 1}))
    data = (tmp_path / "x.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = {"facts": "[" * 100_000, "sha256": "0"}
    text = json.dumps(header).encode()
    for broken in (text, b"[" * 100_000):
        (tmp_path / "x.safetensors").write_bytes(len(broken).to_bytes(8, "little") + broken)
        for read in (read_facts, read_record):
            with pytest.raises(CorruptRecordError, match="torn"):
                read(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[]",
        "null",
        '{"format": 1}',
        '{"format": 1, "settings": {}, "fingerprint": "x"}',
    ],
    ids=["deep", "list", "null", "empty", "without backbone"],
)
def test_a_description_of_wrong_content_is_corrupt(text, folder, loaded_tiny) -> None:
    (folder / "learner.json").write_text(text)
    with pytest.raises(CorruptRecordError):
        Learner.load(folder, loaded_tiny)


def test_other_files_among_the_versions_are_ignored(folder, loaded_tiny) -> None:
    (folder / "versions" / "notes.safetensors").write_text("mine")
    assert len(History(folder, lambda key: None).versions()) == 2
    Learner.load(folder, loaded_tiny)
