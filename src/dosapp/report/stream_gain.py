"""What the stream is worth: gain in accuracy against the share of correct pseudo-labels."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dosapp.experiments.identity import comparable_settings
from dosapp.experiments.result import Result
from dosapp.methods.registry import METHODS
from dosapp.report.tables import row_label
from dosapp.settings import RunSettings

# Settings of the stream: a run without one is the reference whatever they are.
STREAM_SETTINGS = {
    "stream",
    "stream_batch_size",
    "stream_fraction",
    "stream_noise",
    "stream_lr",
    "stream_dirichlet",
    "imbalanced",
    "correlated",
    "one_class",
    "classes_per_batch",
    "first_stream",
    "disjoint_stream",
    "confidence_gate",
    "entropy_lr_scaling",
    "skew_aware_ema",
    "mask_reactivation",
    "reactivation_interval",
}
assert set(RunSettings.model_fields) >= STREAM_SETTINGS


@dataclass(frozen=True)
class StreamGain:
    """A run with a stream, compared with the same one without."""

    label: str
    data: str
    seed: int
    correct: float  # pseudo-labels in per cent, mean over sessions after the first
    accuracy: float  # points gained
    forgetting: float  # points; negative is better


def compute_stream_gains(results: Iterable[Result]) -> list[StreamGain]:
    """Pair every run that adapts with the run of the same seed that does not.

    Args:
        results: Results of any datasets; those without a partner are left out.

    Returns:
        One gain per pair.
    """
    results = list(results)
    references = {_reference_key(r): r for r in results if not _adapts(r)}
    gains = []
    for result in results:
        reference = references.get(_reference_key(result))
        later = [share for share in result.pseudo_labels[1:] if share is not None]
        if reference is None or not _adapts(result) or not later:
            continue
        accuracy, forgetting = (
            (result.metrics[name] or 0.0) - (reference.metrics[name] or 0.0)
            for name in ("accuracy", "forgetting")
        )
        label = row_label(result, comparable_settings(result.settings))
        data, seed = result.stream["name"], result.settings["seed"]
        gains.append(StreamGain(label, data, seed, float(np.mean(later)), accuracy, forgetting))
    return gains


def _adapts(result: Result) -> bool:
    """Whether there were pseudo-labels after any session."""
    return any(share is not None for share in result.pseudo_labels)


def _reference_key(result: Result) -> str:
    """The settings that a run with a stream shares with its reference."""
    settings = comparable_settings(result.settings)
    ignored = STREAM_SETTINGS | {"adapt", "options"}
    rest = {name: value for name, value in settings.items() if name not in ignored}
    rest["options"] = _labelled_options(settings)
    facts = [rest, result.stream["name"], result.settings["seed"], result.backbone]
    return json.dumps(facts, sort_keys=True)


def _labelled_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the labelled method; a pair has those of its adapter, too."""
    method, options = METHODS.get(settings["method"]), settings["options"]
    if method is None or not settings["adapt"]:
        return dict(options)
    paths = list(method().hyperparameters())
    return {k: v for k, v in options.items() if any(f".{p}".endswith(f".{k}") for p in paths)}
