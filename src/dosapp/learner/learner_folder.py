"""The folder of a learner: its description, saving, and going back to an old version."""

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dosapp.backbones.base import Backbone
from dosapp.backbones.pretrained import PretrainedBackbone
from dosapp.errors import CorruptRecordError, InputError
from dosapp.history.history import History
from dosapp.history.record import State
from dosapp.methods.registry import rename_options
from dosapp.runtime.files import ensure_dir, lock_folder, read_json, refuse_links, write_json
from dosapp.runtime.plural import plural
from dosapp.settings import LearnerSettings

if TYPE_CHECKING:
    from dosapp.learner.learner import Learner

FORMAT = 1  # of learner.json
KEYS = {"format", "settings", "fingerprint", "stores_images", "sha256"}


@dataclass(frozen=True)
class LearnerDescription:
    """`learner.json`: what must be known before any tensor is read."""

    settings: Mapping[str, Any]
    fingerprint: str  # of the pretrained backbone
    stores_images: bool = False

    @classmethod
    def read(cls, folder: Path) -> "LearnerDescription":
        """Read the description of the learner in a folder, which must have no links in it.

        Raises:
            InputError: There is no learner, a link, or a format of a newer version.
            CorruptRecordError: The description was changed after it was written.
        """
        path = folder / "learner.json"
        refuse_links(folder)
        if not path.exists():
            inner = folder / "learner"
            hint = f"; try '{inner}'" if (inner / "learner.json").exists() else ""
            raise InputError(f"'{folder}' holds no learner: there is no learner.json in it{hint}")
        values = read_json(path)
        if not isinstance(values, dict):
            raise CorruptRecordError(f"'{path}' does not describe a learner")
        if values.get("format") != FORMAT:
            raise InputError(
                f"'{folder}' has format {values.get('format')}; this dosapp reads {FORMAT}"
            )
        # Before 0.3 there was no checksum.
        if values.get("sha256", _compute_checksum(values)) != _compute_checksum(values):
            raise CorruptRecordError(
                f"'{path}' was changed after it was written: its checksum does not match"
            )
        settings, fingerprint = values.get("settings"), values.get("fingerprint")
        if not isinstance(settings, dict) or not isinstance(fingerprint, str) or set(values) - KEYS:
            raise CorruptRecordError(f"'{path}' does not describe a learner")
        if not isinstance(settings.get("backbone"), str):
            raise CorruptRecordError(f"'{path}' names no backbone")
        return cls(settings, fingerprint, bool(values.get("stores_images", True)))

    def learner_settings(self, folder: Path, device: str) -> LearnerSettings:
        """The settings on a device; settings added since then have their defaults."""
        return LearnerSettings.parse({**self.settings, "device": device}, str(folder))

    def pretrained(self, backbone: Backbone | str | None = None) -> PretrainedBackbone:
        """The pretrained backbone; its fingerprint is checked when it is loaded.

        Args:
            backbone: A loaded one, or another name or folder than the learner was created with.
        """
        name: str = backbone if isinstance(backbone, str) else self.settings["backbone"]
        given = None if isinstance(backbone, str) else backbone
        return PretrainedBackbone(name, self.fingerprint, given)


def write_description(learner: "Learner", folder: Path) -> None:
    """Write `learner.json`, after checking that the folder is empty or the learner's own."""
    check_folder(learner, folder)
    facts = {
        "format": FORMAT,
        "settings": learner.settings.model_dump(mode="json", exclude={"device"}),
        "fingerprint": learner.fingerprint,
        "stores_images": learner.stores_images,
    }
    write_json(folder / "learner.json", {**facts, "sha256": _compute_checksum(facts)})


def _compute_checksum(values: Mapping[str, Any]) -> str:
    """Of everything in a description but the checksum itself."""
    facts = {name: value for name, value in values.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def record_stored_images(folder: Path) -> None:
    """Say in `learner.json` that the folder holds images, if it does not say so yet."""
    path = folder / "learner.json"
    facts = read_json(path)
    if not facts["stores_images"]:
        facts["stores_images"] = True
        write_json(path, {**facts, "sha256": _compute_checksum(facts)})


def check_folder(learner: "Learner", folder: Path) -> None:
    """Raise an `InputError` if a folder holds something else than this learner."""
    if (folder / "learner.json").exists():
        known = LearnerDescription.read(folder)
        settings = known.learner_settings(folder, learner.settings.device)
        theirs, ours = (_comparable(s).model_dump() for s in (settings, learner.settings))
        differing = [name for name in ours if theirs[name] != ours[name]]
        if not learner.class_head.follows_stream:  # it moves no means, whatever the setting is
            differing = [name for name in differing if name != "head_session_drift"]
        if differing or known.fingerprint != learner.fingerprint:
            listed = ", ".join(differing) or "another backbone of the same name"
            raise InputError(
                f"'{folder}' holds a learner with other settings ({listed}); save elsewhere"
            )
    elif folder.exists() and not folder.is_dir():
        raise InputError(f"'{folder}' is a file; give a folder to save to")
    elif folder.exists() and any(path.name[0] != "." for path in folder.iterdir()):
        raise InputError(f"'{folder}' is not empty and holds no learner; save elsewhere")


def _comparable(settings: LearnerSettings) -> LearnerSettings:
    """With today's names of hyper-parameters."""
    options = rename_options(settings.method, settings.adapt, settings.options, settings.stages)
    return settings.model_copy(update={"options": options})


def load_latest(history: History) -> tuple[State, State | None]:
    """The last checkpoint; if it is corrupt, the newest readable version with a warning."""
    try:
        return history.resume()
    except CorruptRecordError as error:
        recovered = history.recover()
        if recovered is None:
            raise CorruptRecordError(
                f"{error}; no version can be read without it, so restore a backup (dosapp restore)"
            ) from error
        number, state = recovered
        warnings.warn(
            f"{error}; continuing from version {number}, the last readable one", stacklevel=2
        )
        return state, None


def save_learner(learner: "Learner", folder: Path, reason: str) -> None:
    """Append a version to a learner's folder; see `Learner.save`."""
    check_folder(learner, folder)
    with lock_folder(ensure_dir(folder)) as lock:
        write_description(learner, folder)
        history = learner.history(folder)
        history.begin_writing(lock)
        latest = history.latest()
        stored = latest.facts["sessions"] if latest else 0
        if stored > learner.sessions:
            raise InputError(
                f"'{folder}' holds a learner after {plural(stored, 'session')}, and this one has "
                f"had {learner.sessions}; continue that one (Learner.load), or save elsewhere"
            )
        history.append(learner.state(), learner.working_state(), reason)


def append_rollback(learner: "Learner", folder: Path, number: int) -> "Learner":
    """Append an old version of a folder as a new one; see `Learner.rollback`.

    Args:
        learner: The folder's learner, before any training.
        folder: Its folder.
        number: The version to go back to.

    Returns:
        The learner at that version.

    Raises:
        InputError: The folder is the checkpoint of a run.
    """
    with lock_folder(folder) as lock:
        history = learner.history(folder)
        history.begin_writing(lock)
        state, working = load_latest(history)
        if working is not None and not is_own_checkpoint(working):
            raise InputError(
                f"'{folder}' is the checkpoint of a run; copy it and roll back the copy"
            )
        current = learner.at(state, working, trainable=False)
        old = current.rollback_copy(history.at(number))
        history.append(old.state(), old.working_state(), f"rolled back to version {number}")
    return old


def is_own_checkpoint(working: State) -> bool:
    """Whether a learner wrote a checkpoint itself; a run adds facts about its progress."""
    return set(working.facts) <= {"chosen"}
