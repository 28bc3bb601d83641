"""Plan a run: settings → backbone, method, scenario, and the key of its result."""

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
from dosapp.experiments.identity import compute_identity, compute_key
from dosapp.experiments.presets import apply_preset
from dosapp.methods.base import Method
from dosapp.methods.registry import build_method, import_methods
from dosapp.scenario import Scenario, concat_scenarios, split_dataset
from dosapp.settings import (
    PAPER_BATCH_SIZE,
    PAPER_EPOCHS,
    PAPER_LR,
    RunSettings,
    read_options,
    read_yaml,
)

PAPER_ORDER = Path("paper")  # --class-order paper: the order of SPU's code, the datasets' own


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
        return compute_key(self.identity)


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
    import_methods(settings.method, settings.adapt)
    backbone = load_backbone(settings.backbone)
    dataset = None if data is None else as_dataset(data, backbone.preprocess)
    if dataset is not None:
        settings = settings.model_copy(update={"data": f"./{dataset.name}"})  # no registered name
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
    """Write the default learning rate, epochs and batch sizes into the settings.

    The embedded backbone has a rate for each method. Named datasets have the paper's defaults; on
    data of the user's own None remains: sessions and streams decide
    (`learner/training_defaults.py`), unless the stream is ordered by batches.
    """
    s = settings
    is_named = all(name in SYNTHETIC or name in PAPER_DATASETS for name in s.data.split("+"))
    defaults = (PAPER_LR, PAPER_EPOCHS, PAPER_BATCH_SIZE) if is_named else (None, None, None)
    values = {
        "lr": s.lr if s.auto_lr else s.lr or stored_lr(s.backbone, s.method) or defaults[0],
        "epochs": s.epochs or defaults[1],
        "batch_size": s.batch_size or defaults[2],
        "stream_batch_size": s.stream_batch_size
        or (PAPER_BATCH_SIZE if is_named or s.classes_per_batch else None),
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
    """Warn about classes that a class order leaves out: a file may name only some."""
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
        size = s.stream_batch_size or PAPER_BATCH_SIZE
        scenario = scenario.few_classes(*few, batch_size=size)
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
