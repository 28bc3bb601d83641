"""What a service finds in its folder when it starts, and while it runs."""

import errno
from pathlib import Path

import pytest
import torch

from dosapp.errors import CorruptRecordError, StorageError
from dosapp.learner.learner import Learner
from dosapp.service.server import describe_learner
from dosapp.service.service import LearningService, open_service
from dosapp.service.settings import ServiceSettings
from support.faults import failing_call

SETTINGS: ServiceSettings = ServiceSettings.parse({"threads": 1, "adapt": False, "canary_share": 0})


def learn(service: LearningService, *names: str) -> tuple[str, str]:
    """Train a session; returns how it ended and why."""
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    job = service.learn(dict.fromkeys(names, images), "alice")
    assert job.ended.wait(300)
    return job.state, job.message


def test_temporary_files_of_a_killed_writer_are_removed(folder) -> None:
    """Row 14 of the attack."""
    left = [
        folder / ".working.safetensors.0123456789abcdef",
        folder / "versions" / ".000002.safetensors.0123456789abcdef",
        folder / ".service.json.0123456789abcdef",
    ]
    for path in left:
        path.write_text("half")
    with open_service(folder, SETTINGS):
        assert not [path for path in left if path.exists()]


def test_the_start_says_what_is_served_and_why_it_does_not_adapt(folder) -> None:
    with open_service(folder, ServiceSettings(threads=1)) as service:
        first, reason = describe_learner(service, folder).split("\n")
        assert first == f"{folder}: version 1, {len(service.classes)} classes"
        assert reason.startswith("adaptation is off: the canary has no image of")
        with open_service(folder, SETTINGS, follow=True) as replica:
            assert describe_learner(replica, folder).startswith(f"a replica of {folder}: version")
    with open_service(folder, ServiceSettings(threads=1, require_canary=False)) as service:
        assert describe_learner(service, folder) == first
        service.freeze("alice")
        assert describe_learner(service, folder).split("\n")[1].startswith("frozen by alice")


def test_a_deleted_lock_does_not_lead_to_two_writers(folder) -> None:
    """Row 10: the second commit fails in one sentence, and nothing is lost."""
    with open_service(folder, SETTINGS) as first:
        assert learn(first, "owl", "fox")[0] == "done"
        (folder / ".lock").unlink()
        with open_service(folder, SETTINGS) as second:
            assert learn(second, "emu", "gnu")[0] == "done"
            state, message = learn(first, "bee", "ant")
            assert state == "failed"
            assert "was deleted or replaced" in message
            assert learn(second, "elk", "cat")[0] == "done"
    names = set(Learner.load(folder).classes)
    assert {"owl", "fox", "emu", "gnu", "elk", "cat"} <= names
    assert not {"bee", "ant"} & names


@pytest.mark.parametrize("call", [9, 16, 24])
def test_a_read_error_stops_the_start_and_the_next_one_has_everything(folder, call) -> None:
    """Row 9: acknowledged classes were gone, also after a healthy restart."""
    with open_service(folder, SETTINGS) as service:
        learn(service, "owl", "fox")
    expected = Learner.load(folder).digest()
    with (
        failing_call(call, code=errno.EIO),
        pytest.raises(StorageError, match="cannot be read now"),
        open_service(folder, SETTINGS),
    ):
        pass
    assert not list(folder.rglob("*.damaged"))
    with open_service(folder, SETTINGS) as service:
        assert service.writer.learner.digest() == expected


@pytest.mark.parametrize("text", ["[]", '{"froze": ""}', '{"frozen": 1}'])
def test_a_damaged_freeze_file_is_one_sentence(folder: Path, text) -> None:
    (folder / "service.json").write_text(text)
    with (
        pytest.raises(CorruptRecordError, match="whether adaptation is frozen"),
        open_service(folder, SETTINGS),
    ):
        pass


def test_a_changed_description_is_detected(folder) -> None:
    """Row 17: one flipped bit in a setting went unnoticed."""
    path = folder / "learner.json"
    text = path.read_text()
    assert '"weight_decay": 0.2' in text
    path.write_text(text.replace('"weight_decay": 0.2', '"weight_decay": 0.3'))
    with pytest.raises(CorruptRecordError, match="checksum does not match"):
        Learner.load(folder)
