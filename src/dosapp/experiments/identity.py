"""What determines a result: the key under which it is stored, its row in tables, and its label."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dosapp.backbones.base import Backbone
from dosapp.learner.training_defaults import RULE_VERSION, choose_batch_size
from dosapp.methods.base import Method
from dosapp.methods.registry import drop_default_options, get_method, rename_options
from dosapp.scenario import Scenario
from dosapp.settings import PAPER_BATCH_SIZE, RunSettings, hash_key, list_stages

SEMANTICS_VERSION = 1  # increased when the same settings would give another result

TITLES = {
    "self-training": "D^u",
    "zero-shot": "zero-shot",
    "spu-released": "SPU as released",
    "dss-style": "DSS-style",
}


def compute_identity(
    settings: RunSettings, backbone: Backbone, method: Method, scenario: Scenario
) -> dict[str, Any]:
    """Everything that determines a result, and nothing that does not.

    The scenario's hash stands for all settings that shape it, the fingerprint for the backbone, and
    the hyper-parameters for the options and their defaults. Devices and microbatches round
    differently, no more. Names are those of version 0.1, so that stored results keep their keys.
    """
    s, external = settings, method.external_images(backbone.preprocess)
    stream_size = s.stream_batch_size or common_stream_size(scenario)
    is_decided = None not in (s.lr, s.epochs, s.batch_size, stream_size)
    sizes = [s.epochs, s.batch_size, stream_size, s.buffer_size, s.seed]
    return {
        "meaning": SEMANTICS_VERSION,
        "method": s.method,
        "adapt": s.adapt,
        "options": _drop_disabled(method.key_hyperparameters()),
        "learning": [s.lr, s.weight_decay, *sizes],
        "stream": scenario.hash,
        "backbone": backbone.fingerprint(),
        **({} if is_decided else {"training": RULE_VERSION}),  # sessions decide, by this rule
        **({"one class": 2} if _has_session_of_one_class(scenario) else {}),  # 1: nothing trained
        **_enabled_features(s),
        **({"reads": hash_key({"reads": external})} if external else {}),
        **({} if s.precision == "float32" else {"precision": s.precision}),
        **_external_sources(s),
    }


def compute_key(identity: Mapping[str, Any]) -> str:
    """The hash under which a result is stored."""
    return hash_key(identity)


def _has_session_of_one_class(scenario: Scenario) -> bool:
    sessions = map(scenario.session, range(len(scenario.task_groups)))
    return any(len(session.classes) == 1 for session in sessions)


def common_stream_size(scenario: Scenario) -> int | None:
    """The batch size that all streams choose; None if they choose different ones."""
    sessions = map(scenario.session, range(len(scenario.task_groups)))
    lengths = [len(session.unlabelled) for session in sessions]
    sizes = {choose_batch_size(n) for n in lengths if n} or {PAPER_BATCH_SIZE}
    return sizes.pop() if len(sizes) == 1 else None


def _external_sources(settings: RunSettings) -> dict[str, str]:
    """A hash of the files that define methods of other packages and their base classes: an edited
    method is another run."""
    methods = [get_method(name) for name in (settings.method, settings.adapt) if name]
    classes = [cls for method in methods for cls in method.__mro__ if issubclass(cls, Method)]
    external = [cls for cls in classes if not cls.__module__.startswith("dosapp.")]
    try:
        found = [inspect.getsource(inspect.getmodule(cls) or cls) for cls in external]
    except (OSError, TypeError):  # defined in an interactive session
        return {}
    sources = list(dict.fromkeys(found))
    return {"source": hash_key({"source": sources})} if sources else {}


# Mitigations and changes of the loss: setting → (name in keys, as in version 0.1; name in labels).
FEATURES = {
    "confidence_gate": ("gate", "gate"),
    "entropy_lr_scaling": ("temper", "entropy lr"),
    "skew_aware_ema": ("skew_aware", "skew-aware"),
    "mask_reactivation": ("readmit", "reactivation"),
    "stream_lr": ("stream_lr", "stream lr"),
    "all_class_negatives": ("rivals", "all-class negatives"),
    "merging": ("merging", "merging"),
    "align": ("align", "alignment"),
    "head": ("head", "head"),
    "head_text_weight": ("head_text_weight", "text"),
    "head_session_drift": ("head_session_drift", "session drift"),
    "head_ensemble": ("head_ensemble", "frozen ensemble"),
}


def _enabled_features(settings: RunSettings) -> dict[str, Any]:
    """The features that are on, by their names in keys."""
    features = {key: getattr(settings, name) for name, (key, _) in FEATURES.items()}
    if settings.mask_reactivation:
        features["readmit_every"] = settings.reactivation_interval
    if settings.head == "ranpac":
        features["head_width"] = settings.head_width
    return _drop_disabled(features)


def _drop_disabled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is off (none, false, zero, empty): a feature that is added later, and is off,
    does not change the key of a finished result."""
    return {name: value for name, value in settings.items() if value}


# Settings that do not enter the key: where the data lies and how the same numbers are computed.
NOT_IN_KEY = frozenset(
    {"data_dir", "device", "compile", "microbatch", "gradient_checkpointing", "skip_bad_images"}
)


def comparable_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by which runs are grouped into rows: all that enter the key, except the seed.

    Args:
        settings: Setting names and JSON values of a result or a run; missing ones have defaults,
            and names of version 0.1, also of hyper-parameters, are replaced by today's.
    """
    values = {**RunSettings().model_dump(mode="json"), **RunSettings.rename_aliases(settings)}
    names = values["method"], values["adapt"]
    stages = list_stages(values["merging"], values["align"])
    options = rename_options(*names, values["options"], stages)
    values["options"] = drop_default_options(*names, options, stages)
    # Where a folder lies is not in the key; an id on the hub is no path.
    parts = [Path(p).name if p[:1] in "/.~" else p for p in str(values["data"]).split("+")]
    values["data"] = "+".join(parts)
    if not values["mask_reactivation"]:
        values["reactivation_interval"] = RunSettings().reactivation_interval
    if values["head"] != "ranpac":
        values["head_width"] = RunSettings().head_width
    return {k: v for k, v in values.items() if k not in NOT_IN_KEY and k != "seed"}


def method_title(method: str) -> str:
    """How tables call a method."""
    return TITLES.get(method, get_method(method).__name__)


def run_label(settings: RunSettings) -> str:
    """How tables call a run: `SPU + D^u`, `DoSAPP (sparsity=0.3) + ER=100`."""
    s, label = settings, method_title(settings.method)
    if s.adapt:
        label += f" + {method_title(s.adapt)}"
    if s.method == "dosapp" and not s.stream:
        label += " without TTL"
    if s.options:
        label += " (" + ", ".join(f"{k}={v}" for k, v in s.options.items()) + ")"
    if s.buffer_size:
        label += f" + ER={s.buffer_size}"
    features = {name: getattr(s, setting) for setting, (_, name) in FEATURES.items()}
    for name, value in _drop_disabled(features).items():
        text = value if isinstance(value, str) else f"{value:g}"
        label += f" + {name}" + ("" if value is True else f"={text}")
    return label
