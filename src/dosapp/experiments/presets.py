"""Presets: named readings of the paper, as settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dosapp.errors import unknown_name
from dosapp.settings import RunSettings, read_options, read_yaml

FILE = Path(__file__).parent / "presets.yaml"


def apply_preset(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Put a preset beneath settings: what they give explicitly wins.

    Args:
        name: Name of a preset.
        values: Settings of a run, by today's names.

    Returns:
        The settings with those of the preset added.

    Raises:
        InputError: There is no such preset.

    Example:
        >>> apply_preset("paper-likely", {"method": "dosapp"})["options"]
        {'interval': 'epoch'}
    """
    presets = read_yaml(FILE)
    if str(name) not in presets:
        raise unknown_name("preset", str(name), presets)
    method = values.get("method", RunSettings().method)
    merged: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for part in (presets[name]["all"], presets[name].get(method, {}), values):
        merged |= part
        options |= read_options(part)
    return {**merged, "options": options}
