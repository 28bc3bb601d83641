"""Tables of the `datasets` package: Parquet files go through the same functions as the hub."""

import dataclasses
import io
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dosapp.data.cache import CachedImages
from dosapp.data.paper_sets.datasets import PaperDataset
from dosapp.data.registry import PAPER_DATASETS, load_dataset
from dosapp.errors import InputError
from support.images import PREPROCESS, write_images


def test_neither_a_local_copy_nor_the_package(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"give --data-dir; .* needs datasets; .*\[hub\]"):
        load_dataset("cub", PREPROCESS)


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The package, with a cache of its own."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets


@pytest.fixture
def write_table(datasets, tmp_path):
    """Write a folder of Parquet files; red is the number of the label."""

    def write(labels: list[object], feature: object = None, **splits: int) -> Path:
        folder = tmp_path / "table"
        folder.mkdir(exist_ok=True)
        for split, times in splits.items():
            column = labels * times
            reds = [list(dict.fromkeys(labels)).index(label) for label in column]
            images = [Image.new("RGB", (9, 8), (red, 3, 5)) for red in reds]
            table = datasets.Dataset.from_dict({"image": images, "label": column})
            table = table.cast_column("image", datasets.Image())
            if feature is not None:
                table = table.cast_column("label", feature)
            table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
        return folder

    return write


def mean_reds(images, rows) -> list[int]:
    return [int(pixels[0].float().mean()) for pixels in images.read(rows)]


class TestAnyTable:
    def test_images_and_labels(self, write_table) -> None:
        folder = write_table(["cat", "dog", "red_fox"], train=4, test=2)
        data = load_dataset(str(folder), PREPROCESS)
        assert data.classes == ("cat", "dog", "red fox")
        assert (len(data.train.labels), len(data.test.labels)) == (12, 6)
        assert isinstance(data.train.images, CachedImages)
        assert mean_reds(data.test.images, [0, 1, 2]) == data.test.labels[:3].tolist()

    def test_without_a_test_split_a_third_of_each_class_is_tested(self, write_table) -> None:
        folder = write_table([f"c{n}" for n in range(12)], train=6)
        data = load_dataset(str(folder), PREPROCESS)
        assert np.bincount(data.test.labels).tolist() == [2] * 12
        assert np.bincount(data.train.labels).tolist() == [4] * 12
        train_keys = {data.train.images.key(n) for n in range(48)}
        assert not train_keys & {data.test.images.key(n) for n in range(24)}

    def test_a_copied_table_has_the_same_keys(self, write_table, tmp_path) -> None:
        folder = write_table(["cat", "dog"], train=4, test=2)
        shutil.copytree(folder, tmp_path / "copy")
        first, second = (load_dataset(str(p), PREPROCESS) for p in (folder, tmp_path / "copy"))
        keys = [[data.train.images.key(n) for n in range(8)] for data in (first, second)]
        assert keys[0] == keys[1]

    def test_a_table_beside_class_folders_is_ignored(self, write_table) -> None:
        folder = write_table(["cat", "dog"], train=4)
        for name in ("x", "y"):
            write_images(folder / name, 4)
        assert load_dataset(str(folder), PREPROCESS).classes == ("x", "y")

    def test_unknown_to_the_hub(self, datasets) -> None:
        message = "acme/nothing' is not a local path, and the hub did not provide it"
        with pytest.raises(InputError, match=message):
            load_dataset("acme/nothing", PREPROCESS)

    def test_without_an_image_column(self, datasets, tmp_path) -> None:
        (tmp_path / "text").mkdir()
        table = datasets.Dataset.from_dict({"text": ["a"], "label": [0]})
        table.to_parquet(tmp_path / "text" / "train.parquet")
        with pytest.raises(InputError, match="columns text, label, but none with images"):
            load_dataset(str(tmp_path / "text"), PREPROCESS)

    def test_a_split_without_labels(self, datasets, write_table) -> None:
        folder = write_table([0, 1], datasets.ClassLabel(names=["a", "b"]), train=2)
        table = datasets.Dataset.from_parquet(str(folder / "train-00000-of-00001.parquet"))
        unlabelled = table.remove_columns("label").add_column("label", [-1] * 4)
        unlabelled.to_parquet(folder / "test-00000-of-00001.parquet")
        with pytest.raises(InputError, match="label -1 in row 0, which is no class"):
            load_dataset(str(folder), PREPROCESS)

    def test_an_unreadable_image_is_named_or_skipped(self, datasets, tmp_path) -> None:
        buffer = io.BytesIO()
        Image.new("RGB", (9, 8)).save(buffer, "PNG")
        good = buffer.getvalue()
        cells = [{"bytes": data, "path": None} for data in (good, b"no", b"", good)]
        table = datasets.Dataset.from_dict({"image": cells, "label": ["a", "a", "b", "b"]})
        table = table.cast_column("image", datasets.Image())
        (tmp_path / "broken").mkdir()
        for split in ("train", "test"):
            table.to_parquet(tmp_path / "broken" / f"{split}.parquet")
        data = load_dataset(str(tmp_path / "broken"), PREPROCESS)
        with pytest.raises(InputError, match=r"row 1 of train' cannot be read"):
            data.train.images.check()
        with pytest.warns(UserWarning, match=r"2 images skipped"):
            data = load_dataset(str(tmp_path / "broken"), PREPROCESS, skip_bad=True)
        assert data.train.labels.tolist() == [0, 1]


class TestPaperDatasets:
    def test_the_class_order_of_the_table_may_be_another(
        self, datasets, write_table, monkeypatch
    ) -> None:
        paper = PaperDataset.from_name("gtsrb")
        names = list(reversed(paper.classes))
        folder = write_table(names, datasets.ClassLabel(names=names), train=1, test=2)
        local = {"train": [str(folder), "train"], "test": [str(folder), "test"]}
        papers = {name: PaperDataset.from_name(name) for name in PAPER_DATASETS}
        papers["gtsrb"] = dataclasses.replace(paper, hub={**paper.hub, **local})
        monkeypatch.setattr(PaperDataset, "from_name", papers.get)
        with pytest.warns(UserWarning, match="cannot be compared"):
            data = load_dataset("gtsrb", PREPROCESS)
        assert data.classes == paper.order
        reds = mean_reds(data.train.images, range(43))
        assert [data.classes[n] for n in data.train.labels] == [names[red] for red in reds]

    @pytest.mark.parametrize("name", PAPER_DATASETS)
    def test_loading_scripts_are_requested_as_parquet(self, name, datasets, monkeypatch) -> None:
        requests = []

        def fail(hub_id: str, split: str, revision: str | None) -> None:
            requests.append((hub_id, revision))
            raise OSError("offline")

        monkeypatch.setattr(datasets, "load_dataset", fail)
        with pytest.raises(InputError, match="the hub did not provide it"):
            load_dataset(name, PREPROCESS)
        scripts = {"HuggingFaceM4/FGVC-Aircraft", "alkzar90/CC6204-Hackaton-Cub-Dataset"}
        [(hub_id, revision)] = requests
        assert revision == ("refs/convert/parquet" if hub_id in scripts else None)
