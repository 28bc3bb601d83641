"""A study: variants × datasets × seeds × class orders, with held-out data.

reference: dosapp
variants:
  dosapp: {method: dosapp}
  moved statistics: {method: dosapp, head: gda-moved}
development:
  hard: {data: shapes-hard}
held_out:
  signs: {data: signs}
settings: {tasks: 10}
seeds: 0-2
class_orders: [null, 1993]

Development data may be run as often as one likes. Held-out data is opened once: the file
`STUDY.opened.json` records when, and with which variants. A study whose variants have changed since
then is refused, because its choices could have been made by looking.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dosapp.errors import InputError, unknown_name
from dosapp.experiments.grid import parse_seeds
from dosapp.experiments.presets import apply_preset
from dosapp.methods.registry import import_methods
from dosapp.runtime.files import read_json, write_json
from dosapp.runtime.machine import timestamp
from dosapp.settings import RunSettings, hash_key, read_options, read_yaml


class Study(BaseModel):
    """The description of a study, as its YAML file gives it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reference: str  # the variant that the others are compared with
    variants: dict[str, dict[str, Any]]
    development: dict[str, dict[str, Any]] = {}
    held_out: dict[str, dict[str, Any]] = {}
    settings: dict[str, Any] = {}  # of all runs
    seeds: str | int = "0-2"
    class_orders: list[int | None] = [None]

    @classmethod
    def read(cls, path: Path) -> "Study":
        """Read a study file.

        Raises:
            InputError: A key, a setting or the reference is unknown.
        """
        values = read_yaml(path)
        unknown = next((key for key in values if key not in cls.model_fields), None)
        if unknown is not None:
            raise unknown_name(f"key in '{path}'", str(unknown), cls.model_fields)
        try:
            study = cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            raise InputError(f"'{path}', {name}: {first['msg'].lower()}") from error
        if study.reference not in study.variants:
            raise unknown_name("variant", study.reference, study.variants)
        shared = study.development.keys() & study.held_out.keys()
        if shared:
            raise InputError(f"'{path}' has '{min(shared)}' in development and in held_out")
        list(study.runs(held_out=True))  # every run is checked before the first is computed
        return study

    def runs(self, held_out: bool = False) -> "Iterator[StudyRun]":
        """The runs of the development data and, if wanted, of the held-out data; seed by seed."""
        groups = {
            "development": self.development,
            **({"held_out": self.held_out} if held_out else {}),
        }
        for seed in parse_seeds(str(self.seeds)):
            for group, datasets in groups.items():
                for dataset, data in datasets.items():
                    for order in self.class_orders:
                        for variant, own in self.variants.items():
                            parts = (self.settings, data, own)
                            options = {k: v for p in parts for k, v in read_options(p).items()}
                            values = {**self.settings, **data, **own, "seed": seed}
                            values |= {"options": options}
                            values |= {} if order is None else {"class_order_seed": order}
                            preset = values.pop("preset", None)
                            values = apply_preset(preset, values) if preset else values
                            settings = RunSettings.parse(values, f"variant '{variant}'")
                            import_methods(settings.method, settings.adapt)
                            yield StudyRun(variant, dataset, group == "held_out", settings)

    def variants_hash(self) -> str:
        """A hash of everything that can be chosen by looking at results."""
        return hash_key(self.model_dump(exclude={"seeds", "development"}))


@dataclass(frozen=True)
class StudyRun:
    """One run of a study."""

    variant: str
    dataset: str
    is_held_out: bool
    settings: RunSettings


def open_held_out(path: Path, study: Study) -> Mapping[str, Any]:
    """Record that the held-out data of a study is looked at now; later calls read the record.

    Args:
        path: The study file.
        study: Its content.

    Returns:
        When it was opened, and the hash of the variants.

    Raises:
        InputError: The variants have changed since it was opened.
    """
    if not study.held_out:
        raise InputError(f"'{path}' has no held_out data to open")
    record = path.with_suffix(".opened.json")
    if not record.exists():
        write_json(record, {"opened": timestamp(), "variants": study.variants_hash()})
    opened: dict[str, Any] = read_json(record)
    if opened.get("variants") != study.variants_hash():
        raise InputError(
            f"the held-out data of '{path}' was opened on {opened.get('opened')} with other "
            "variants, so a choice made since then could have looked at it; start a new study with "
            "other held-out data"
        )
    return opened
