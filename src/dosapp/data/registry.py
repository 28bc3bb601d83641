"""Datasets by name: generated, one of the paper's, or a place on disk."""

import re
from collections.abc import Mapping
from pathlib import Path

from dosapp.backbones.base import Backbone
from dosapp.data.base import Dataset, Listed
from dosapp.data.cache import mapped
from dosapp.data.files import SUFFIXES
from dosapp.data.folder import own_data
from dosapp.data.hub import hub_data, table_data
from dosapp.data.paper_sets.datasets import KNOWN, known_data
from dosapp.data.synthetic.domain import Domain
from dosapp.data.synthetic.shapes import SHAPES
from dosapp.data.synthetic.signs import SIGNS
from dosapp.errors import unknown_name

HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
DOMAINS: Mapping[str, Domain] = {domain.name: domain for domain in (SHAPES, SIGNS)}


def load_dataset(
    name: str,
    net: Backbone,
    *,
    train: int | None = None,
    test: int | None = None,
    data_dir: Path | None = None,
    skip_bad: bool = False,
) -> Dataset:
    """A generated set, one of the paper's, or the path of one's own; pictures at the backbone's
    size, decoded once for all runs."""
    if name in DOMAINS:
        return DOMAINS[name].dataset(net.image_size, train=train or 40, test=test or 40)
    if name in KNOWN:
        local = known_data(name, data_dir, net.picture) if data_dir else None
        return _decoded(local or hub_data(name, net.picture), net, skip_bad)
    place = Path(name)
    if not name or (not place.exists() and "/" not in name and "." not in name):
        raise unknown_name(
            "dataset", name, [*DOMAINS, *KNOWN], "dosapp datasets; or a path that exists"
        )
    if is_table(place) if place.exists() else HUB_ID.fullmatch(name):
        return _decoded(table_data(name, net.picture), net, skip_bad)
    return _decoded(own_data(place, net.picture), net, skip_bad)


def is_table(place: Path) -> bool:
    """A folder with Parquet files and no pictures."""
    suffixes = {p.suffix.lower() for p in place.rglob("*")} if place.is_dir() else set()
    return ".parquet" in suffixes and not suffixes & SUFFIXES


def _decoded(found: Listed, net: Backbone, skip_bad: bool) -> Dataset:
    train, test = (mapped(half, net.preparation, skip_bad) for half in (found.train, found.test))
    return Dataset(found.name, found.classes, train, test, found.prompts)
