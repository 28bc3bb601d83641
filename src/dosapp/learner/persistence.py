"""A learner's state as tensors and facts, and the description in its folder."""

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dosapp.backbones.base import Backbone
from dosapp.backbones.pretrained import PretrainedBackbone
from dosapp.data.base import Prompts
from dosapp.errors import CorruptRecordError, InputError
from dosapp.functional.named_tensors import select_prefix
from dosapp.history.history import History
from dosapp.history.record import State
from dosapp.methods.registry import rename_options
from dosapp.runtime.files import read_json, refuse_links, write_json
from dosapp.settings import PAPER_LR, LearnerSettings
from dosapp.student.selection import Selection

if TYPE_CHECKING:
    from dosapp.learner.learner import Learner

FORMAT = 1  # of learner.json
ROLES = ("student", "method", "caution", "head", "mask", "canary")  # beside those of copies
KEYS = {"format", "settings", "fingerprint", "stores_images", "sha256"}


@dataclass(frozen=True)
class LearnerDescription:
    """`learner.json`: what must be known before any tensor is read."""

    settings: Mapping[str, Any]
    fingerprint: str  # of the backbone before any training
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
        """The backbone before any training; its fingerprint is checked when it is loaded.

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
        if (
            _comparable(settings) != _comparable(learner.settings)
            or known.fingerprint != learner.fingerprint
        ):
            raise InputError(f"'{folder}' holds a learner with other settings; save elsewhere")
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


def is_own_checkpoint(working: State) -> bool:
    """Whether a learner wrote a checkpoint itself; a run adds facts about its progress."""
    return set(working.facts) <= {"chosen"}


def capture_state(learner: "Learner") -> State:
    """Everything that decides what a learner predicts and how it continues to learn."""
    student, method = learner.student, learner.method
    weights = student.backbone.weights()
    tensors = {f"student/{n}": weights[n].detach() for n in sorted(student.ever_selected)}
    for role, copy in _list_copies(learner).items():
        own = {n: w.detach() for n, w in copy.weights().items() if w is not weights[n]}
        tensors |= {f"{role}/{n}": w for n, w in own.items()}
    tensors |= {f"method/{n}": t for n, t in method.state_dict().items()}
    tensors |= {f"caution/{n}": t for n, t in learner.mitigations.state_dict().items()}
    tensors |= {f"head/{n}": t for n, t in learner.head.state_dict().items()}
    tensors |= {f"mask/{n}": m for n, m in (student.selection.mask or {}).items()}
    tensors |= {f"canary/{n}": t for n, t in learner.canary.state_dict().items()}
    prompts = student.text_head.prompts
    facts = {
        "classes": list(student.classes),
        "prompts": {name: asdict(prompts[name]) for name in student.classes},
        "sessions": learner.sessions,
        "steps": student.steps,
        **_selection_facts(student.selection),
        "stored_images": len(learner.replay_buffer),
        **_training_facts(learner),
    }
    if learner.canary.labels:
        facts["canary"] = dict(learner.canary.labels)
    cpu = {name: tensor.cpu() for name, tensor in tensors.items()}
    return State(cpu, facts, private=learner.canary.stores_images)


def _training_facts(learner: "Learner") -> dict[str, Any]:
    """How it trains, if a session or the user chose other values than the settings."""
    values, initial = asdict(learner.training), asdict(learner.initial_training)
    changed = {name: value for name, value in values.items() if value != initial[name]}
    return {"training": changed} if changed else {}


def _list_copies(learner: "Learner") -> dict[str, Backbone]:
    """Copies of the backbone that the method and the head keep."""
    return {**learner.method.shared_copies(), **learner.head.shared_copies()}


def capture_working_state(learner: "Learner") -> State:
    """What only the next step needs: optimizer, replay buffer, selection of the session."""
    student = learner.student
    selection = student.session_selection
    is_other = selection is not student.selection  # in an extra stage
    groups = {
        "optimizer": student.optimizer_state(),
        "memory": learner.replay_buffer.state_dict(),
        "method": learner.method.working_state_dict(),
        "chosen": (selection.mask or {}) if is_other else {},
    }
    tensors = {f"{group}/{n}": t.cpu() for group, held in groups.items() for n, t in held.items()}
    facts = {"chosen": _selection_facts(selection)} if is_other else {}
    return State(tensors, facts, private=learner.stores_images)


def restore_state(learner: "Learner", state: State, working: State | None = None) -> None:
    """Set a learner to a captured state, from whatever device it was captured.

    Raises:
        CorruptRecordError: The state is not one of this learner; the learner cannot be used then.
    """
    _check_state(learner, state)
    try:
        _restore(learner, state, working)
    except (
        AssertionError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:
        # The record has a right checksum, but was not written by a learner with these settings.
        raise CorruptRecordError(
            f"the stored state does not fit the learner ({type(error).__name__}: {error}); "
            "restore a backup"
        ) from error


def _check_state(learner: "Learner", state: State) -> None:
    """Raise a `CorruptRecordError` if weights are of another model, infinite or not numbers."""
    facts = state.facts
    if not all(isinstance(name, str) for name in facts.get("classes", [None])) or not all(
        isinstance(facts.get(name), int) for name in ("sessions", "steps")
    ):
        raise CorruptRecordError("the stored state has no valid classes, sessions and steps")
    weights, copies = learner.student.backbone.weights(), _list_copies(learner)
    for key, tensor in state.tensors.items():
        role, name = _split_role(key, copies)
        if role not in {*ROLES, *copies}:
            raise CorruptRecordError(f"the stored state has a tensor '{key}' of unknown use")
        if role == "student" or role in copies:
            if name not in weights or weights[name].shape != tensor.shape:
                raise CorruptRecordError(
                    f"the stored state has '{key}' of shape {list(tensor.shape)}, which the "
                    "learner's backbone does not have"
                )
            if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
                raise CorruptRecordError(
                    f"the stored state has values in '{key}' that are infinite or not numbers, so "
                    "it is not used; roll back to an earlier version, or restore a backup"
                )


def is_weight(key: str) -> bool:
    """Whether a tensor of a state is a weight of the student or of a copy of it."""
    return key.partition("/")[0] not in ROLES[1:]


def _split_role(key: str, copies: Mapping[str, Backbone]) -> tuple[str, str]:
    """`student/x` → student, x; the role of a copy may have slashes itself."""
    for role in copies:
        if key.startswith(f"{role}/"):
            return role, key.removeprefix(f"{role}/")
    role, _, name = key.partition("/")
    return role, name


def _restore(learner: "Learner", state: State, working: State | None) -> None:
    student, method, facts = learner.student, learner.method, state.facts
    student.text_head.clear()
    for name in facts["classes"]:
        prompts = facts["prompts"][name]
        student.text_head.add_classes([name], Prompts(prompts["train"], tuple(prompts["evaluate"])))
    learner.sessions, student.steps = facts["sessions"], facts["steps"]
    learner.training = replace(learner.initial_training, **facts.get("training", {}))
    student.change_lr(learner.training.lr or PAPER_LR)

    tensors = {n: t.to(learner.device) for n, t in state.tensors.items()}
    extra = {n: t.to(learner.device) for n, t in working.tensors.items()} if working else {}
    trained = select_prefix("student/", tensors)
    student.set_trainable(Selection(tuple(trained)))  # copies stop sharing these weights
    student.assign(trained)
    for role, copy in _list_copies(learner).items():
        student.load_copy(copy, select_prefix(f"{role}/", tensors))
    method.load_state_dict(select_prefix("method/", tensors) | select_prefix("method/", extra))
    learner.mitigations.load_state_dict(select_prefix("caution/", tensors))
    learner.head.load_state_dict(select_prefix("head/", tensors))
    learner.canary.load_state_dict(select_prefix("canary/", tensors), facts.get("canary", {}))
    student.set_trainable(_read_selection(facts, select_prefix("mask/", tensors)))
    student.find_differences()
    student.session_selection = student.selection
    if working is not None:
        if "chosen" in working.facts:
            mask = select_prefix("chosen/", extra)
            student.session_selection = _read_selection(working.facts["chosen"], mask)
        student.load_optimizer_state(select_prefix("optimizer/", extra))
        learner.replay_buffer.load_state_dict(select_prefix("memory/", working.tensors))
    student.weights_assigned = False  # the weights were the student's own


def _selection_facts(selection: Selection) -> dict[str, Any]:
    """A selection without its mask, as JSON."""
    names, rates = list(selection.names), dict(selection.lr_scales)
    return {"selection": {"names": names, "rates": rates}, "masked": selection.mask is not None}


def _read_selection(facts: Mapping[str, Any], mask: dict[str, Tensor]) -> Selection:
    values = facts["selection"]
    return Selection(
        tuple(values["names"]), mask if facts["masked"] else None, lr_scales=values["rates"]
    )
