"""Datasets by name: generated, one of the paper's, a table, or a path on disk."""

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

from dosapp.data.base import Dataset, ImageArray, ImageSource
from dosapp.data.cache import cache_dataset
from dosapp.data.files import SUFFIXES
from dosapp.data.folder import load_folder
from dosapp.data.hub import is_saved_table, load_from_hub, load_table
from dosapp.data.paper_sets.datasets import PAPER_DATASETS, load_local_copy
from dosapp.data.preprocess import Preprocess
from dosapp.data.synthetic.domain import Domain
from dosapp.data.synthetic.shapes import SHAPES, SHAPES_HARD
from dosapp.data.synthetic.signs import SIGNS
from dosapp.errors import unknown_name

HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
SYNTHETIC: Mapping[str, Domain] = {domain.name: domain for domain in (SHAPES, SHAPES_HARD, SIGNS)}


def load_dataset(
    name: str | Path,
    preprocess: Preprocess,
    *,
    train_images: int | None = None,
    test_images: int | None = None,
    data_dir: Path | str | None = None,
    skip_bad: bool = False,
    hold_out: bool = True,
) -> Dataset[ImageArray]:
    """Load a dataset by name or path. Images are decoded once and cached for all runs.

    Args:
        name: A generated set, one of the paper's, a hub id, or the path of a folder, tar, zip, CSV
            or table.
        preprocess: Resize and crop of the backbone that will see the images.
        train_images: Training images per class of a generated set.
        test_images: Test images per class of a generated set.
        data_dir: A local copy of the paper's datasets; without it they come from the hub.
        skip_bad: Skip unreadable images, with a warning, instead of raising.
        hold_out: Make a third of each class the test split of a path that has none; otherwise all
            its images train, and the test split is empty.

    Returns:
        The dataset, with images at the backbone's size.

    Raises:
        InputError: The name is unknown or the data cannot be read.

    Example:
        >>> preprocess = Preprocess(32, {"shortest_edge": 32}, resample=3)  # of `tiny`
        >>> dataset = load_dataset("signs", preprocess, train_images=2, test_images=2)
        >>> len(dataset.classes), len(dataset.train.labels)
        (100, 200)
    """
    name = str(name)
    if name in SYNTHETIC:
        sizes = (preprocess.image_size, train_images or 40, test_images or 40)
        return SYNTHETIC[name].draw_dataset(*sizes)
    return cache_dataset(open_dataset(name, data_dir, hold_out), preprocess, skip_bad)


def open_dataset(
    name: str, data_dir: Path | str | None = None, hold_out: bool = True
) -> Dataset[ImageSource]:
    """Open a dataset that is not generated, with its images as they are stored."""
    if name in PAPER_DATASETS:
        return load_local_copy(name, Path(data_dir)) if data_dir else load_from_hub(name)
    path = Path(name)
    if not name or (not path.exists() and "/" not in name and "." not in name):
        folders = [path.name for path in Path().iterdir() if path.is_dir()]
        near = difflib.get_close_matches(name, folders, n=1, cutoff=0.7)
        known = [*SYNTHETIC, *PAPER_DATASETS, *near]
        raise unknown_name("dataset", name, known, "dosapp datasets; or a path that exists")
    if _is_table(path) if path.exists() else HUB_ID.fullmatch(name):
        return load_table(name, hold_out)
    return load_folder(path, hold_out)


def _is_table(path: Path) -> bool:
    """A folder with Parquet files and no images, or one that `save_to_disk` wrote."""
    if is_saved_table(path):
        return True
    suffixes = {p.suffix.lower() for p in path.rglob("*")} if path.is_dir() else set()
    return ".parquet" in suffixes and not suffixes & SUFFIXES
