"""A learner's state as named tensors and facts: captured, checked and restored."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dosapp.backbones.base import Backbone
from dosapp.data.base import Prompts
from dosapp.errors import CorruptRecordError
from dosapp.functional.named_tensors import select_prefix
from dosapp.history.record import State
from dosapp.settings import PAPER_LR
from dosapp.student.trainable_weights import Selection

if TYPE_CHECKING:
    from dosapp.learner.learner import Learner

# Beside those of copies. "caution" holds the mitigations; stored names never change.
ROLES = ("student", "method", "caution", "head", "mask", "canary")


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
    tensors |= {f"head/{n}": t for n, t in learner.class_head.state_dict().items()}
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
    return {**learner.method.shared_copies(), **learner.class_head.shared_copies()}


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
    learner.class_head.load_state_dict(select_prefix("head/", tensors))
    learner.canary.load_state_dict(select_prefix("canary/", tensors), facts.get("canary", {}))
    student.set_trainable(_read_selection(facts, select_prefix("mask/", tensors)))
    student.rebuild_differing_indices()
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
