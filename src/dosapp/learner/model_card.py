"""The model card of a learner, written from its history."""

import json
from pathlib import Path
from typing import Any

import yaml

from dosapp.history.history import History
from dosapp.history.version import Version
from dosapp.learner.description import LearnerDescription
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
    sections = [
        f"---\n{yaml.safe_dump(_header(settings), sort_keys=False)}---",
        f"# {name}",
        f"A CLIP classifier that learned {plural(len(facts['classes']), 'class')} in "
        f"{plural(facts['sessions'], 'session')} and {plural(facts['steps'], 'step')}, written by "
        "[dosapp](https://github.com/dosapp/dosapp).",
        f"```python\nfrom dosapp import Learner\n\nlearner = Learner.from_pretrained({name!r})\n"
        "learner.predict([image])  # Pillow images\n```",
        f"## Classes\n\n{_format_classes(facts['classes'])}",
        f"## Versions\n\n{_format_versions(versions)}",
        f"## Metrics\n\n{_format_metrics(versions)}",
        f"## Training\n\n{_format_settings(settings, description.fingerprint)}",
        f"## What is stored\n\n{_describe_storage(description, versions)}",
    ]
    return "\n\n".join(sections) + "\n"


def _header(settings: LearnerSettings) -> dict[str, Any]:
    header: dict[str, Any] = {
        "library_name": "dosapp",
        "pipeline_tag": "zero-shot-image-classification",
        "tags": ["continual-learning", "test-time-adaptation", "clip", settings.method],
    }
    if "/" in settings.backbone and not Path(settings.backbone).exists():
        header["base_model"] = settings.backbone
    return header


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
    lines = [f"- {name}: {json.dumps(value)}" for name, value in last.seen.items()]
    return f"Measured with version {last.number}:\n\n" + "\n".join(lines)


def _format_settings(settings: LearnerSettings, fingerprint: str) -> str:
    defaults = LearnerSettings().model_dump(mode="json")
    values = settings.model_dump(mode="json", exclude={"device"})
    always = ("backbone", "method", "adapt", "lr", "epochs", "batch_size", "buffer_size", "seed")
    shown = {k: v for k, v in values.items() if k in always or v != defaults[k]}
    lines = [f"- {name}: {json.dumps(value)}" for name, value in shown.items()]
    return "\n".join([*lines, f"- fingerprint of the backbone before training: `{fingerprint}`"])


def _describe_storage(description: LearnerDescription, versions: list[Version]) -> str:
    size = sum(v.size for v in versions) / 1e6
    images = (
        "The files hold images (a replay buffer, a canary or images of the stream)."
        if description.stores_images
        else "No images are stored."
    )
    return (
        f"{images} {plural(len(versions), 'version')} of {size:.1f} MB hold the weights that "
        "changed, not the backbone itself, which is loaded by its name. The files are safetensors "
        "and JSON: loading them runs no code."
    )
