"""A run before its first step: settings → backbone, method, stream, and the key of its result."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from dosapp.backbones.base import Backbone
from dosapp.backbones.clip import load_backbone
from dosapp.data.base import Dataset, Prompts
from dosapp.data.registry import load_dataset
from dosapp.errors import InputError
from dosapp.methods.base import Method
from dosapp.methods.registry import build_method, get_method
from dosapp.scenario import Scenario, concat_scenarios, split_dataset
from dosapp.settings import RunSettings, key_of, named_options, read_yaml

SEMANTICS_VERSION = 1  # raised when the same settings would give another result


def load_settings(path: Path | None, flags: Mapping[str, Any]) -> RunSettings:
    """A file's settings with the flags on top."""
    values = read_yaml(path) if path else {}
    if {"runs", "seeds"} & set(values):
        raise InputError(f"'{path}' describes many runs; use: dosapp grid {path}")
    options = {**named_options(values), **flags.get("options", {})}
    merged = {**values, **flags, "options": options}
    found: RunSettings = RunSettings.parse(merged, str(path) if path else "the settings")
    return found


def build_scenario(settings: RunSettings, net: Backbone) -> Scenario:
    """The stream a run's settings describe."""
    s = settings
    order, groups = _order(s.class_order)
    parts = []
    for name in [s.data] if Path(s.data).exists() else s.data.split("+"):
        dataset = load_dataset(
            name,
            net,
            train=s.train_images,
            test=s.test_images,
            data_dir=s.data_dir,
            skip_bad=s.skip_bad_images,
        )
        if s.classes is not None:
            dataset = first_classes(dataset, s.classes)
        if s.caption:
            dataset = replace(dataset, prompts=Prompts.of(s.caption))
        parts.append(split_dataset(dataset, groups or s.tasks, seed=s.seed, order=order))
    stream = concat_scenarios(*parts) if len(parts) > 1 else parts[0]
    if s.full_test:  # first: all of D^u is asked about, whatever is done to the stream
        stream = stream.full_test()
    if s.stream_noise or s.test_noise:
        stream = stream.noisy(stream=s.stream_noise, test=s.test_noise)
    if s.fraction < 1:
        stream = stream.fraction(s.fraction)
    if s.imbalanced:
        stream = stream.imbalanced()
    if s.correlated:
        stream = stream.correlated()
    if s.one_class:
        stream = stream.one_class()
    if s.chunks:
        stream = stream.chunks()
    return stream if s.stream else stream.without_unlabelled()


def first_classes(dataset: Dataset, count: int) -> Dataset:
    if count > len(dataset.classes):
        raise InputError(
            f"{count} classes asked of {dataset.name}, which has {len(dataset.classes)}"
        )
    return replace(dataset, classes=dataset.classes[:count])


def _order(path: Path | None) -> tuple[list[str] | None, list[list[str]] | None]:
    """A class-order file: names in order (lines, or a YAML list), or a YAML list of lists."""
    if path is None:
        return None, None
    try:
        text = path.read_text()
        found = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"class order '{path}' cannot be read ({error})") from error
    if isinstance(found, list) and all(isinstance(group, list) for group in found):
        return None, [[str(name) for name in group] for group in found]
    lines = [str(name) for name in found] if isinstance(found, list) else text.splitlines()
    return [line.strip() for line in lines if line.strip()], None


def title(method: str) -> str:
    """How a table calls a method."""
    special = {
        "self-training": "D^u",
        "zero-shot": "zero-shot",
        "spu-released": "SPU as released",
        "dss-style": "DSS-style",
    }
    return special.get(method, get_method(method).__name__)


def label(settings: RunSettings) -> str:
    """How a table calls a run."""
    text = title(settings.method)
    if settings.adapt:
        text += f" + {title(settings.adapt)}"
    if settings.method == "dosapp" and not settings.stream:
        text += " without TTL"
    if settings.options:
        text += " (" + ", ".join(f"{k}={v}" for k, v in settings.options.items()) + ")"
    if settings.memory:
        text += f" + ER={settings.memory}"
    for name, value in enabled_mitigations(settings).items():
        if name == "readmit_every":
            continue
        text += f" + {name.replace('_', ' ')}" + ("" if value is True else f"={value:g}")
    return text


@dataclass(frozen=True)
class Plan:
    """A run before its first step: what it will see, and the key its result belongs under."""

    settings: RunSettings
    net: Backbone  # the run trains this very one: a plan is run once
    stream: Scenario
    identity: dict[str, Any]

    @property
    def key(self) -> str:
        return key_of(self.identity)


def plan(settings: RunSettings) -> Plan:
    settings = settings.resolved()
    net = load_backbone(settings.backbone)
    method = build_method(settings.method, settings.adapt, settings.options)
    stream = build_scenario(settings, net)
    if method.joint:
        stream = stream.joint()
    if 0 < settings.memory < len(stream.task_groups):
        raise InputError(
            f"a memory of {settings.memory} pictures cannot keep one of each of "
            f"{len(stream.task_groups)} sessions; give --memory {len(stream.task_groups)} or more, or 0"
        )
    return Plan(settings, net, stream, identity(settings, net, method, stream))


def identity(
    settings: RunSettings, net: Backbone, method: Method, stream: Scenario
) -> dict[str, Any]:
    """Everything that determines a result, and nothing that does not.

    The stream's hash stands for all that shapes it, the fingerprint for the backbone, the method
    for its options and defaults. Devices and microbatches round differently, no more.
    """
    s, reads = settings, method.reads(net)
    return {
        "meaning": SEMANTICS_VERSION,
        "method": s.method,
        "adapt": s.adapt,
        "options": _enabled(method.hyperparameters()),
        "learning": [s.rate, s.weight_decay, s.epochs, s.batch, s.stream_batch, s.memory, s.seed],
        "stream": stream.hash,
        "backbone": net.fingerprint(),
        **enabled_mitigations(s),
        **({"reads": key_of({"reads": reads})} if reads else {}),
        **({} if s.precision == "float32" else {"precision": s.precision}),
    }


def enabled_mitigations(settings: RunSettings) -> dict[str, Any]:
    """Settings of caution and of the step that differ from off. Only these enter a key and a label:
    one that is added later changes no stored result."""
    names = ["gate", "temper", "skew_aware", "readmit", "stream_lr", "rivals"]
    names += ["readmit_every"] if settings.readmit else []
    return _enabled({name: getattr(settings, name) for name in names})


def _enabled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are off (none, false, zero, empty): a feature that is added later, and is
    off, does not make a finished result another one."""
    return {name: value for name, value in settings.items() if value}
