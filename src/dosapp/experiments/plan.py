"""Plan a run: settings → backbone, method, scenario, and the key of its result."""

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dosapp.backbones.base import Backbone
from dosapp.backbones.registry import load_backbone, stored_lr
from dosapp.data.base import Dataset, ImageArray, Prompts
from dosapp.data.convert import as_dataset
from dosapp.data.folder import read_task_groups
from dosapp.data.paper_sets.datasets import PAPER_DATASETS, PaperDataset
from dosapp.data.preprocess import Preprocess
from dosapp.data.registry import SYNTHETIC, load_dataset
from dosapp.data.stream_order import parse_class_range
from dosapp.errors import InputError
from dosapp.experiments.presets import apply_preset
from dosapp.learner.training import RULE_VERSION
from dosapp.methods.base import Method
from dosapp.methods.registry import (
    build_method,
    drop_default_options,
    get_method,
    rename_options,
)
from dosapp.scenario import Scenario, concat_scenarios, split_dataset
from dosapp.settings import (
    PAPER_BATCH_SIZE,
    PAPER_EPOCHS,
    PAPER_LR,
    RunSettings,
    hash_key,
    list_stages,
    read_options,
    read_yaml,
)

SEMANTICS_VERSION = 1  # increased when the same settings would give another result

PAPER_ORDER = Path("paper")  # --class-order paper: the order of SPU's code, the datasets' own

TITLES = {
    "self-training": "D^u",
    "zero-shot": "zero-shot",
    "spu-released": "SPU as released",
    "dss-style": "DSS-style",
}


@dataclass(frozen=True)
class Plan:
    """A run before its first step. The run trains this very backbone: use a plan once."""

    settings: RunSettings
    backbone: Backbone
    method: Method
    scenario: Scenario
    identity: dict[str, Any]  # everything that determines the result

    @property
    def key(self) -> str:
        """The hash under which the result is stored."""
        return hash_key(self.identity)


def plan(settings: RunSettings, data: Any = None) -> Plan:
    """Load everything that a run needs and compute the key of its result.

    Args:
        settings: The run.
        data: Labelled images instead of those that the settings name, in any form that
            `as_dataset` takes; without a test split a third of each class becomes one.

    Returns:
        The plan, to be given to `run`.

    Raises:
        InputError: A name is unknown, data is missing, or settings do not go together.

    Example:
        >>> plan(RunSettings(classes=6, tasks=2)).scenario.name
        'shapes'
    """
    backbone = load_backbone(settings.backbone)
    dataset = None if data is None else as_dataset(data, backbone.preprocess)
    if dataset is not None:
        settings = settings.model_copy(update={"data": f"./{dataset.name}"})  # no name of ours
    settings = resolve_training(settings)
    method = build_method(settings.method, settings.adapt, settings.options, settings.stages)
    scenario = build_scenario(settings, backbone.preprocess, dataset)
    if method.joint:
        scenario = scenario.joint()
    sessions = len(scenario.task_groups)
    if 0 < settings.buffer_size < sessions:
        raise InputError(
            f"a replay buffer of {settings.buffer_size} images cannot keep one of each of "
            f"{sessions} sessions; give --buffer-size {sessions} or more, or 0"
        )
    identity = compute_identity(settings, backbone, method, scenario)
    return Plan(settings, backbone, method, scenario, identity)


def resolve_training(settings: RunSettings) -> RunSettings:
    """Write the default learning rate, epochs and batch size into the settings.

    The embedded backbone has a rate for each method. Named datasets have the paper's defaults; on
    data of the user's own None remains: sessions decide (`learner/training.py`).
    """
    s = settings
    is_named = all(name in SYNTHETIC or name in PAPER_DATASETS for name in s.data.split("+"))
    defaults = (PAPER_LR, PAPER_EPOCHS, PAPER_BATCH_SIZE) if is_named else (None, None, None)
    values = {
        "lr": s.lr or stored_lr(s.backbone, s.method) or defaults[0],
        "epochs": s.epochs or defaults[1],
        "batch_size": s.batch_size or defaults[2],
    }
    return s.model_copy(update=values)


def load_settings(
    path: Path | None, flags: Mapping[str, Any], preset: str | None = None
) -> RunSettings:
    """Settings of a YAML file with flags on top, and a preset beneath both."""
    values = read_yaml(path) if path else {}
    own_preset = values.pop("preset", None)
    preset = preset or own_preset
    if {"runs", "seeds"} & set(values):
        raise InputError(f"'{path}' describes many runs; use: dosapp grid {path}")
    options = {**read_options(values), **flags.get("options", {})}
    values = {**RunSettings.rename_aliases(values), **flags, "options": options}
    values = apply_preset(preset, values) if preset else values
    return RunSettings.parse(values, str(path) if path else "the settings")


def build_scenario(
    settings: RunSettings, preprocess: Preprocess, given: Dataset[ImageArray] | None = None
) -> Scenario:
    """Load the data, unless it is given, and build the scenario that the settings describe."""
    s = settings
    order, groups = (None, None) if s.class_order == PAPER_ORDER else _read_class_order(s)
    parts = []
    for name in [s.data] if given or Path(s.data).exists() else s.data.split("+"):
        dataset = given or load_dataset(
            name,
            preprocess,
            train_images=s.train_images,
            test_images=s.test_images,
            data_dir=s.data_dir,
            skip_bad=s.skip_bad_images,
        )
        if s.classes is not None:
            dataset = _first_classes(dataset, s.classes)
        if s.template:
            dataset = replace(dataset, prompts=Prompts.from_template(s.template))
        names = _order_classes(name, dataset, s) or order
        parts.append(split_dataset(dataset, groups or s.tasks, seed=s.seed, order=names))
        _announce_left_out(dataset, parts[-1])
    scenario = concat_scenarios(*parts) if len(parts) > 1 else parts[0]
    if s.full_test:  # first: D^u is evaluated on, so no modifier of the stream may touch it
        scenario = scenario.full_test()
    if s.stream_noise or s.test_noise:
        scenario = scenario.noisy(stream=s.stream_noise, test=s.test_noise)
    return _modify_stream(scenario, s) if s.stream else scenario.without_stream()


def _announce_left_out(dataset: Dataset[ImageArray], scenario: Scenario) -> None:
    """A file of class names may name only some."""
    missing = [name for name in dataset.classes if name not in set(scenario.classes)]
    if missing:
        listed = ", ".join(f"'{name}'" for name in missing[:5]) + (", …" if missing[5:] else "")
        count = f"{len(scenario.classes)} of the {len(dataset.classes)} classes"
        warnings.warn(
            f"the class order names {count} of {dataset.name}; left out: {listed}", stacklevel=4
        )


def _modify_stream(scenario: Scenario, settings: RunSettings) -> Scenario:
    """Which images of D^u are streamed, and in which order."""
    s = settings
    if s.stream_fraction < 1:
        scenario = scenario.fraction(s.stream_fraction)
    if s.imbalanced:
        scenario = scenario.imbalanced()
    if s.correlated:
        scenario = scenario.correlated()
    if s.one_class:
        scenario = scenario.one_class()
    if s.classes_per_batch:
        few = parse_class_range(s.classes_per_batch)
        scenario = scenario.few_classes(*few, batch_size=s.stream_batch_size)
    if s.stream_dirichlet:
        scenario = scenario.dirichlet(s.stream_dirichlet)
    if not s.first_stream:
        scenario = scenario.without_first_stream()
    if s.disjoint_stream:
        scenario = scenario.disjoint()
    return scenario


def _first_classes(dataset: Dataset[ImageArray], count: int) -> Dataset[ImageArray]:
    if count > len(dataset.classes):
        raise InputError(
            f"{count} classes asked of {dataset.name}, which has {len(dataset.classes)}"
        )
    return replace(dataset, classes=dataset.classes[:count])


def _order_classes(
    name: str, dataset: Dataset[ImageArray], settings: RunSettings
) -> list[str] | None:
    """The order by seed: PyCIL's permutation of the labels of the release; None: another order."""
    s, is_papers = settings, name in PAPER_DATASETS
    if s.class_order == PAPER_ORDER and not is_papers:
        known = ", ".join(PAPER_DATASETS)
        raise InputError(f"class_order is 'paper', which {name} does not have; only {known} do")
    if s.class_order_seed is None:
        return None
    classes = PaperDataset.from_name(name).classes if is_papers else dataset.classes
    permutation = np.random.RandomState(s.class_order_seed).permutation(len(classes))
    names = [classes[n] for n in permutation]
    return [name for name in names if name in dataset.classes]  # --classes may keep a part


def _read_class_order(
    settings: RunSettings,
) -> tuple[list[str] | None, list[list[str]] | None]:
    """A file of class names in order (lines, or a YAML list), or a YAML list of lists."""
    path = settings.class_order
    if settings.task_column is not None:
        return None, read_task_groups(Path(settings.data), settings.task_column)
    if path is None:
        return None, None
    try:
        text = path.read_text()
        values = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"class order '{path}' cannot be read ({error})") from error
    if isinstance(values, list) and all(isinstance(group, list) for group in values):
        return None, [[str(name) for name in group] for group in values]
    lines = [str(name) for name in values] if isinstance(values, list) else text.splitlines()
    return [line.strip() for line in lines if line.strip()], None


# What determines a result


def compute_identity(
    settings: RunSettings, backbone: Backbone, method: Method, scenario: Scenario
) -> dict[str, Any]:
    """Everything that determines a result, and nothing that does not.

    The scenario's hash stands for all settings that shape it, the fingerprint for the backbone, and
    the hyper-parameters for the options and their defaults. Devices and microbatches round
    differently, no more. Names are those of version 0.1, so that stored results keep their keys.
    """
    s, external = settings, method.external_images(backbone.preprocess)
    is_decided = None not in (s.lr, s.epochs, s.batch_size)
    sizes = [s.epochs, s.batch_size, s.stream_batch_size, s.buffer_size, s.seed]
    return {
        "meaning": SEMANTICS_VERSION,
        "method": s.method,
        "adapt": s.adapt,
        "options": _drop_disabled(method.key_hyperparameters()),
        "learning": [s.lr, s.weight_decay, *sizes],
        "stream": scenario.hash,
        "backbone": backbone.fingerprint(),
        **({} if is_decided else {"training": RULE_VERSION}),  # sessions decide, by this rule
        **_enabled_features(s),
        **({"reads": hash_key({"reads": external})} if external else {}),
        **({} if s.precision == "float32" else {"precision": s.precision}),
        **_external_sources(s),
    }


def _external_sources(settings: RunSettings) -> dict[str, str]:
    """A hash of the source of methods of other packages: an edited method is another run."""
    classes = [get_method(name) for name in (settings.method, settings.adapt) if name]
    external = [cls for cls in classes if not cls.__module__.startswith("dosapp.")]
    try:
        sources = [inspect.getsource(inspect.getmodule(cls) or cls) for cls in external]
    except (OSError, TypeError):  # defined in an interactive session
        return {}
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


# How tables call a run


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
