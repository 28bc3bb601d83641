"""The model card of a learner, written from its history."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dosapp.backbones.names import find_source
from dosapp.errors import InputError
from dosapp.history.history import History
from dosapp.history.version import Version
from dosapp.learner.learner_folder import LearnerDescription
from dosapp.runtime.plural import plural
from dosapp.settings import LearnerSettings

SHOWN_CLASSES, SHOWN_VERSIONS = 100, 30


def write_model_card(folder: Path, name: str) -> str:
    """Write a card: classes, versions, method, settings, metrics if known, what is stored.

    Args:
        folder: A learner's folder.
        name: The name of the model, for the title and the example.

    Returns:
        Markdown with the YAML header of the hub.
    """
    description = LearnerDescription.read(folder)
    settings = description.learner_settings(folder, "cpu")
    versions = History(folder, lambda _: None).versions()
    empty: dict[str, Any] = {"classes": [], "sessions": 0, "steps": 0}
    facts = versions[-1].facts if versions else empty
    place = "" if is_public(settings.backbone) else ", backbone='FOLDER'"
    sections = [
        f"---\n{yaml.safe_dump(_header(settings), sort_keys=False)}---",
        f"# {name}",
        f"A CLIP classifier that learned {plural(len(facts['classes']), 'class')} in "
        f"{plural(facts['sessions'], 'session')} and {plural(facts['steps'], 'step')}, written by "
        "[dosapp](https://github.com/dosapp/dosapp).",
        "```python\nfrom dosapp import Learner\n\n"
        f"learner = Learner.from_pretrained({name!r}{place})\n"
        "learner.predict([image])  # Pillow images\n```",
        f"## Classes\n\n{_format_classes(facts['classes'])}",
        f"## Versions\n\n{_format_versions(versions)}",
        f"## Metrics\n\n{_format_metrics(versions)}",
        f"## Training\n\n{_format_settings(settings, facts, description.fingerprint)}",
        f"## What is stored\n\n{_describe_storage(description, settings.backbone, versions)}",
    ]
    return "\n\n".join(sections) + "\n"


def _header(settings: LearnerSettings) -> dict[str, Any]:
    header: dict[str, Any] = {
        "library_name": "dosapp",
        "pipeline_tag": "zero-shot-image-classification",
        "tags": ["continual-learning", "test-time-adaptation", "clip", settings.method],
    }
    hub_id = find_hub_id(settings.backbone)
    if hub_id is not None:
        header["base_model"] = hub_id
    return header


def find_hub_id(backbone: str) -> str | None:
    """The id on the hub from which others load a backbone; None: a folder, or part of dosapp.

    Example:
        >>> find_hub_id("ViT-B-16"), find_hub_id("tiny"), find_hub_id("/models/mine")
        ('openai/clip-vit-base-patch16', None, None)
    """
    try:
        source = find_source(backbone)
    except InputError:  # a folder that has moved
        return None
    return None if source.is_folder else source.place


def _format_classes(classes: list[str]) -> str:
    if not classes:
        return "None yet."
    more = len(classes) - SHOWN_CLASSES
    return ", ".join(classes[:SHOWN_CLASSES]) + (f" and {more} more" if more > 0 else "") + "."


def _format_versions(versions: list[Version]) -> str:
    lines = ["| version | when | why | classes |", "|---|---|---|---|"]
    for v in versions[-SHOWN_VERSIONS:]:
        reason = v.reason.replace("|", "\\|")
        lines.append(f"| {v.number} | {v.created} | {reason} | {len(v.facts['classes'])} |")
    older = len(versions) - SHOWN_VERSIONS
    if older > 0:
        lines.append(f"\n{plural(older, 'older version')} not shown.")
    return "\n".join(lines)


def _format_metrics(versions: list[Version]) -> str:
    measured = [v for v in versions if v.seen]
    if not measured:
        return "None were measured when its versions were written."
    last = measured[-1]
    numbers = {name: value for name, value in last.seen.items() if not isinstance(value, str)}
    lines = [f"- {name}: {json.dumps(value)}" for name, value in numbers.items()]  # no callers
    return f"Measured with version {last.number}:\n\n" + "\n".join(lines)


def _format_settings(settings: LearnerSettings, facts: Mapping[str, Any], fingerprint: str) -> str:
    defaults = LearnerSettings().model_dump(mode="json")
    values = settings.model_dump(mode="json", exclude={"device"})
    values |= facts.get("training", {})  # what was chosen or changed since
    always = ("backbone", "method", "lr", "epochs", "batch_size", "buffer_size", "seed")
    given = {k: v for k, v in values.items() if v is not None}
    shown = {k: v for k, v in given.items() if k in always or v != defaults[k]}
    lines = [f"- {name}: {json.dumps(value)}" for name, value in shown.items()]
    return "\n".join([*lines, f"- fingerprint of the backbone before training: `{fingerprint}`"])


def _describe_storage(
    description: LearnerDescription, backbone: str, versions: list[Version]
) -> str:
    size = sum(v.size for v in versions) / 1e6
    images = (
        "The files hold images (a replay buffer, a canary or images of the stream)."
        if description.stores_images
        else "No images are stored."
    )
    place = (
        "which is loaded by its name"
        if is_public(backbone)
        else "a folder of the author's: give a copy of it as `backbone`"
    )
    return (
        f"{images} {plural(len(versions), 'version')} of {size:.1f} MB hold the weights that "
        f"changed, not the backbone itself, {place}. The files are safetensors and JSON: loading "
        "them runs no code."
    )


def is_public(backbone: str) -> bool:
    """Whether others can load a backbone by its name."""
    return backbone == "tiny" or find_hub_id(backbone) is not None
