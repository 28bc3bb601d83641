"""Datasets by name. A generated one is drawn, anything else is a place on disk."""

from collections.abc import Mapping
from pathlib import Path

from dosapp.backbones.base import Backbone
from dosapp.data.base import Dataset
from dosapp.data.folder import own_data
from dosapp.data.generated import Domain
from dosapp.data.shapes import SHAPES
from dosapp.data.signs import SIGNS
from dosapp.errors import unknown

DOMAINS: Mapping[str, Domain] = {domain.name: domain for domain in (SHAPES, SIGNS)}


def load_dataset(
    name: str,
    net: Backbone,
    *,
    train: int | None = None,
    test: int | None = None,
) -> Dataset:
    """`shapes`, `signs`, or the path of a folder or CSV; pictures at the backbone's size."""
    if name in DOMAINS:
        return DOMAINS[name].dataset(net.pixels, train=train or 40, test=test or 40)
    if not name or (not Path(name).exists() and "/" not in name and "." not in name):
        raise unknown("dataset", name, DOMAINS, "dosapp datasets; or give a path that exists")
    return own_data(Path(name), net.picture)
