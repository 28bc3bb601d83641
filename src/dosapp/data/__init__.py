"""Datasets by name: generated, one of the paper's, or a place on disk."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dosapp.backbones.base import Backbone
from dosapp.data.base import Dataset, Part
from dosapp.data.decoded import Decoded, cache_folder
from dosapp.data.files import Files, readable
from dosapp.data.folder import own_data
from dosapp.data.generated import Domain
from dosapp.data.hub import hub_data
from dosapp.data.known import KNOWN, known_data
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
    data_dir: Path | None = None,
    skip_bad: bool = False,
) -> Dataset:
    """A generated set, one of the paper's, or the path of one's own; pictures at the backbone's
    size, decoded once for all runs."""
    if name in DOMAINS:
        return DOMAINS[name].dataset(net.pixels, train=train or 40, test=test or 40)
    if name in KNOWN:
        local = known_data(name, data_dir, net.picture) if data_dir else None
        return _decoded(local, net, skip_bad) if local else hub_data(name, net.picture)
    if not name or (not Path(name).exists() and "/" not in name and "." not in name):
        raise unknown("dataset", name, [*DOMAINS, *KNOWN], "dosapp datasets; or a path that exists")
    return _decoded(own_data(Path(name), net.picture), net, skip_bad)


def _decoded(dataset: Dataset, net: Backbone, skip_bad: bool) -> Dataset:
    """With its files behind a memory map, and perhaps without those that cannot be read."""

    def mapped(part: Part) -> Part:
        if not isinstance(part.pictures, Files):
            return part
        folder = cache_folder() / "pictures"
        files, labels = (
            readable(part.pictures, part.labels) if skip_bad else (part.pictures, part.labels)
        )
        return Part(Decoded(files, net.preparation, folder), labels)

    return replace(dataset, train=mapped(dataset.train), test=mapped(dataset.test))
