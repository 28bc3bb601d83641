"""Datasets by name: generated, one of the paper's, or a place on disk."""

import re
from collections.abc import Mapping
from pathlib import Path

from dosapp.backbones.base import Backbone
from dosapp.data.base import Dataset, Listed
from dosapp.data.cache import cache_split
from dosapp.data.files import SUFFIXES
from dosapp.data.folder import load_folder
from dosapp.data.hub import load_from_hub, load_table
from dosapp.data.paper_sets.datasets import PAPER_DATASETS, load_local_copy
from dosapp.data.synthetic.domain import Domain
from dosapp.data.synthetic.shapes import SHAPES
from dosapp.data.synthetic.signs import SIGNS
from dosapp.errors import unknown_name

HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
SYNTHETIC: Mapping[str, Domain] = {domain.name: domain for domain in (SHAPES, SIGNS)}


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
    if name in SYNTHETIC:
        return SYNTHETIC[name].dataset(net.image_size, train=train or 40, test=test or 40)
    if name in PAPER_DATASETS:
        local = load_local_copy(name, data_dir, net.picture) if data_dir else None
        return _decoded(local or load_from_hub(name, net.picture), net, skip_bad)
    place = Path(name)
    if not name or (not place.exists() and "/" not in name and "." not in name):
        raise unknown_name(
            "dataset", name, [*SYNTHETIC, *PAPER_DATASETS], "dosapp datasets; or a path that exists"
        )
    if is_table(place) if place.exists() else HUB_ID.fullmatch(name):
        return _decoded(load_table(name, net.picture), net, skip_bad)
    return _decoded(load_folder(place, net.picture), net, skip_bad)


def is_table(place: Path) -> bool:
    """A folder with Parquet files and no pictures."""
    suffixes = {p.suffix.lower() for p in place.rglob("*")} if place.is_dir() else set()
    return ".parquet" in suffixes and not suffixes & SUFFIXES


def _decoded(found: Listed, net: Backbone, skip_bad: bool) -> Dataset:
    train, test = (
        cache_split(half, net.preparation, skip_bad) for half in (found.train, found.test)
    )
    return Dataset(found.name, found.classes, train, test, found.prompts)
