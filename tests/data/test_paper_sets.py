"""The paper's datasets: class orders, prompts, the layouts they come in, and wrong copies."""

import dataclasses
import json
import random
import shutil
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dosapp.data.base import Dataset, ImageArray
from dosapp.data.folder import load_folder
from dosapp.data.paper_sets.datasets import (
    PaperDataset,
    hash_class_files,
    hash_file_names,
    load_local_copy,
)
from dosapp.data.registry import PAPER_DATASETS, load_dataset
from dosapp.errors import InputError
from dosapp.scenario import split_dataset
from support.images import PREPROCESS, write_class_folders, write_image
from support.settings import SHARED, shared_only

CLASSES = {"aircraft": 100, "cars": 196, "cifar100": 100, "cub": 200, "gtsrb": 43}
NUMBERED = [f"{n:03}" for n in range(43)]  # folders of GTSRB


def load(name: str, path: Path) -> Dataset[ImageArray]:
    return load_dataset(name, PREPROCESS, data_dir=path)


def load_subset(name: str, path: Path) -> Dataset[ImageArray]:
    """Load a copy that has fewer images than the release, and expect the two warnings about it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = load(name, path)
    assert len(caught) == 2
    assert all("cannot be compared with published ones" in str(w.message) for w in caught)
    return data


def check_labels(data: Dataset[ImageArray], paper: PaperDataset) -> None:
    """Every image has the label of its class: red is the class index of the release."""
    assert data.classes == paper.order
    for split in (data.train, data.test):
        images = split.images.read(range(len(split.labels)))
        for pixels, label in zip(images, split.labels, strict=True):
            red = paper.classes.index(data.classes[label])
            assert abs(int(pixels[0].float().mean()) - red % 256) <= 1


class TestDescriptions:
    def test_all_five_with_their_class_counts(self) -> None:
        counts = {name: len(PaperDataset.from_name(name).classes) for name in PAPER_DATASETS}
        assert counts == CLASSES

    @pytest.mark.parametrize("name", PAPER_DATASETS)
    def test_the_order_is_a_shuffle_with_a_fixed_seed(self, name) -> None:
        paper = PaperDataset.from_name(name)
        seed = {"aircraft": 0, "cars": 2, "cifar100": 2, "cub": 2, "gtsrb": 1}[name]
        indices = list(range(CLASSES[name]))
        random.Random(seed).shuffle(indices)
        assert paper.order == tuple(paper.classes[n] for n in indices)
        assert len(set(paper.order)) == CLASSES[name]
        first = {  # of the lists of SPU's code
            "aircraft": [23, 8, 11, 7, 48],
            "cars": [20, 77, 96, 166, 48],
            "cifar100": [0, 76, 61, 63, 1],
            "cub": [51, 94, 55, 35, 170],
            "gtsrb": [25, 2, 11, 1, 40],
        }
        assert indices[:5] == first[name]

    def test_prompts(self) -> None:
        papers = {name: PaperDataset.from_name(name) for name in PAPER_DATASETS}
        counts = {name: len(paper.evaluation_templates) for name, paper in papers.items()}
        assert counts == {"aircraft": 2, "cars": 8, "cifar100": 18, "cub": 1, "gtsrb": 3}
        assert papers["cars"].train_template == "a photo of a {}"
        assert papers["gtsrb"].train_template == "a photo of {}"

    def test_ten_tasks_have_the_papers_sizes(self, tmp_path) -> None:
        data = load_subset("gtsrb", write_class_folders(tmp_path, NUMBERED))
        sizes = [len(task.classes) for task in split_dataset(data, 10).tasks]
        assert sizes == [5, 5, 5, 4, 4, 4, 4, 4, 4, 4]


class TestLayouts:
    def test_class_folders_by_number_name_or_alias(self, tmp_path) -> None:
        paper = PaperDataset.from_name("gtsrb")
        for n, names in enumerate(
            (
                NUMBERED,
                [name.replace(" / ", "_or_").replace("_or_", " - ") for name in paper.classes],
                [name.replace("/", "") for name in paper.aliases],
            )
        ):
            check_labels(load_subset("gtsrb", write_class_folders(tmp_path / str(n), names)), paper)

    def test_a_tar_of_class_folders_is_read_without_unpacking(self, tmp_path) -> None:
        write_class_folders(tmp_path / "gtsrb", NUMBERED)
        with tarfile.open(tmp_path / "gtsrb.tar", "w") as archive:
            archive.add(tmp_path / "gtsrb", "gtsrb")
        shutil.rmtree(tmp_path / "gtsrb")
        check_labels(load_subset("gtsrb", tmp_path), PaperDataset.from_name("gtsrb"))

    def test_cub(self, tmp_path) -> None:
        paper = PaperDataset.from_name("cub")
        paths, labels, splits = [], [], []
        for n, name in enumerate(paper.classes):
            folder = f"{n + 1:03}.{name.replace(' ', '_')}"
            for k in range(3):
                number = 3 * n + k + 1
                write_image(tmp_path / "images" / folder / f"{number}.png", n)
                paths.append(f"{number} {folder}/{number}.png")
                labels.append(f"{number} {n + 1}")
                splits.append(f"{number} {int(k == 0)}")
        for name, lines in (
            ("images.txt", paths),
            ("image_class_labels.txt", labels),
            ("train_test_split.txt", splits),
        ):
            (tmp_path / name).write_text("\n".join(lines))
        check_labels(load_subset("cub", tmp_path), paper)

    def test_aircraft(self, tmp_path) -> None:
        paper = PaperDataset.from_name("aircraft")
        lists: dict[str, list[str]] = {"trainval": [], "test": []}
        for n, name in enumerate(paper.classes):
            for k, split in enumerate(("trainval", "test", "test")):
                number = f"{3 * n + k:07}"
                write_image(tmp_path / "data" / "images" / f"{number}.png", n)
                lists[split].append(f"{number} {name}")
        for split, lines in lists.items():
            (tmp_path / "data" / f"images_variant_{split}.txt").write_text("\n".join(lines))
        check_labels(load_subset("aircraft", tmp_path), paper)

    @pytest.mark.parametrize(
        "folders", [["Training"], ["Final_Training/Images"], ["Final_Training/Images", "Training"]]
    )
    def test_gtsrb(self, folders, tmp_path) -> None:
        """The last of the folders is used; images of the other have another colour."""
        rows = ["Filename;Width;Height;ClassId"]
        for n in range(43):
            for folder in folders:
                path = tmp_path / "GTSRB" / folder / f"{n:05}" / "00000_00000.ppm"
                write_image(path, n if folder == folders[-1] else 200)
            for k in range(2):
                write_image(tmp_path / "GTSRB/Final_Test/Images" / f"{2 * n + k:05}.ppm", n)
                rows.append(f"{2 * n + k:05}.ppm;9;8;{n}")
        (tmp_path / "GTSRB" / "GT-final_test.csv").write_text("\n".join(rows))
        check_labels(load_subset("gtsrb", tmp_path), PaperDataset.from_name("gtsrb"))

    def test_cifar100_binary(self, tmp_path) -> None:
        for name, times in (("train", 1), ("test", 2)):
            rows = [bytes([0, n]) + bytes([n]) * 1024 + bytes(2048) for n in range(100)]
            (tmp_path / f"{name}.bin").write_bytes(b"".join(rows * times))
        check_labels(load_subset("cifar100", tmp_path), PaperDataset.from_name("cifar100"))

    def test_cars(self, tmp_path) -> None:
        scipy_io = pytest.importorskip("scipy.io")
        for split, suffix, times in (
            ("cars_train", "train_annos", 1),
            ("cars_test", "test_annos_withlabels", 2),
        ):
            rows = np.zeros(196 * times, dtype=[("class", "i4"), ("fname", "U20")])
            for n in range(196):
                for k in range(times):
                    name = f"{times * n + k:05}.png"
                    write_image(tmp_path / split / name, n)
                    rows[times * n + k] = (n + 1, name)
            scipy_io.savemat(tmp_path / f"cars_{suffix}.mat", {"annotations": rows})
        check_labels(load_subset("cars", tmp_path), PaperDataset.from_name("cars"))


class TestWrongCopies:
    def test_missing(self, tmp_path) -> None:
        with pytest.raises(InputError, match="does not exist; --data-dir takes a copy of cub"):
            load("cub", tmp_path / "x")

    def test_an_unknown_class(self, tmp_path) -> None:
        write_class_folders(tmp_path, [*PaperDataset.from_name("cifar100").classes, "unicorn"])
        with pytest.raises(InputError, match="class 'unicorn', which cifar100 does not have"):
            load("cifar100", tmp_path)

    def test_a_binary_with_more_classes(self, tmp_path) -> None:
        rows = [bytes([0, n]) + bytes(3072) for n in range(101)]
        for name in ("train", "test"):
            (tmp_path / f"{name}.bin").write_bytes(b"".join(rows))
        with pytest.raises(InputError, match=r"train\.bin' has a label beyond the 100 classes"):
            load("cifar100", tmp_path)

    def test_lists_with_more_classes(self, tmp_path) -> None:
        write_image(tmp_path / "images" / "a" / "1.png")
        (tmp_path / "images.txt").write_text("1 a/1.png")
        (tmp_path / "train_test_split.txt").write_text("1 1")
        for wrong in (0, 201):
            (tmp_path / "image_class_labels.txt").write_text(f"1 {wrong}")
            with pytest.raises(InputError, match=r"1\.png' has a label beyond the 200 classes"):
                load("cub", tmp_path)
        for split in ("trainval", "test"):
            (tmp_path / f"images_variant_{split}.txt").write_text("1 Boeing X")
        with pytest.raises(InputError, match="class 'Boeing X', which the release does not have"):
            load("aircraft", tmp_path)

    def test_a_list_with_a_missing_image(self, tmp_path) -> None:
        for split in ("trainval", "test"):
            (tmp_path / f"images_variant_{split}.txt").write_text("0034309 707-320")
        with pytest.raises(InputError, match="looks like the release of aircraft, but something"):
            load("aircraft", tmp_path)

    def test_a_missing_class(self, tmp_path) -> None:
        names = [name for name in PaperDataset.from_name("cifar100").classes if name != "bee"]
        write_class_folders(tmp_path, names)
        with pytest.raises(InputError, match=r"no train images of 1 of cifar100's 100.*'bee'"):
            load("cifar100", tmp_path)

    def test_several_missing_classes_are_named(self, tmp_path) -> None:
        write_class_folders(tmp_path, list(PaperDataset.from_name("cifar100").classes[5:]))
        message = r"5 of cifar100's 100 classes: 'apple', 'aquarium fish', 'baby' and 2 more$"
        with pytest.raises(InputError, match=message):
            load("cifar100", tmp_path)

    def test_a_number_beyond_the_classes(self, tmp_path) -> None:
        write_class_folders(tmp_path, [*NUMBERED, "043"])
        with pytest.raises(InputError, match="class '043'; gtsrb has 43"):
            load("gtsrb", tmp_path)

    def test_numbered_folders_with_the_names_of_another_dataset(self, tmp_path) -> None:
        write_class_folders(tmp_path, [f"{n:03}" for n in range(100)])
        file = tmp_path / "classes.json"
        file.write_text(json.dumps(PaperDataset.from_name("cifar100").classes))
        load_subset("cifar100", tmp_path)
        message = (
            "is not aircraft: 100 of its 100 classes differ, for example class 0 is 'apple' .* "
            "and '707-320' in aircraft"
        )
        with pytest.raises(InputError, match=message):
            load("aircraft", tmp_path)
        file.write_text(json.dumps([*PaperDataset.from_name("gtsrb").aliases, "Unicorns"]))
        with pytest.raises(InputError, match=r"class 43 is 'Unicorns' .* and missing in gtsrb"):
            load("gtsrb", tmp_path)
        for text, problem in (("[", "not JSON"), ('{"apple": 0}', "not a list of class names")):
            file.write_text(text)
            with pytest.raises(InputError, match=rf"classes\.json' is {problem}"):
                load("cifar100", tmp_path)

    @shared_only
    def test_a_known_copy_of_another_dataset(self, tmp_path) -> None:
        with tarfile.open(SHARED / "data" / "cifar100.tar") as archive:
            archive.extractall(tmp_path, filter="data")
        (tmp_path / "cifar100" / "classes.json").unlink()
        with pytest.raises(InputError, match=r"is cifar100 \(the small subset.*\), not aircraft"):
            load("aircraft", tmp_path / "cifar100")

    def test_pickles_of_cifar100_are_refused(self, tmp_path) -> None:
        for name in ("meta", "train", "test"):
            (tmp_path / name).write_bytes(b"\x80\x02")
        with pytest.raises(InputError, match="Python version, a pickle; use the binary version"):
            load("cifar100", tmp_path)


@shared_only
@pytest.mark.parametrize("name", PAPER_DATASETS)
def test_the_small_subsets_can_be_read_and_are_known_copies(name) -> None:
    data = load_subset(name, SHARED / "data")  # no third warning: "is not quite …"
    assert len(data.classes) == CLASSES[name]
    assert data.test.images.read([0]).shape == (1, 3, 32, 32)
    assert np.bincount(data.train.labels).min() >= 6


@pytest.mark.filterwarnings("ignore:the classes of:UserWarning")
class TestKnownCopies:
    def test_the_checksum_depends_on_labels_and_not_on_folders(self, tmp_path) -> None:
        def checksum(path: Path) -> str:
            data = load_folder(path)
            return hash_file_names(data.train, data.test)

        first, second = (
            checksum(write_class_folders(tmp_path / folder, NUMBERED)) for folder in ("a", "b/c")
        )
        assert first == second
        shutil.move(tmp_path / "a/test/000/1.png", tmp_path / "a/test/001/2.png")
        assert checksum(tmp_path / "a") != second

    @pytest.fixture
    def load_changed(self, monkeypatch) -> Callable[[Path, Callable[[], object]], list[str]]:
        """Write a copy of GTSRB, register it, change it, and return the warnings about it."""

        def load_changed(path: Path, change: Callable[[], object]) -> list[str]:
            data = load_folder(write_class_folders(path, NUMBERED))
            copy = {
                "name": "the copy",
                "train": 43,
                "test": 86,
                "files": hash_file_names(data.train, data.test),
                "per_class": " ".join(hash_class_files(data.train, data.test)),
            }
            papers = {name: PaperDataset.from_name(name) for name in PAPER_DATASETS}
            papers["gtsrb"] = dataclasses.replace(papers["gtsrb"], copies=[copy])
            monkeypatch.setattr(PaperDataset, "from_name", papers.get)
            change()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                load_local_copy("gtsrb", path)
            return [str(w.message) for w in caught if "the copy" in str(w.message)]

        return load_changed

    def test_an_unchanged_copy(self, tmp_path, load_changed) -> None:
        assert not load_changed(tmp_path, lambda: None)

    def test_other_files_in_the_same_number_are_named(self, tmp_path, load_changed) -> None:
        def change() -> None:
            shutil.move(tmp_path / "test/000/0.png", tmp_path / "test/001/new.png")
            shutil.move(tmp_path / "test/007/0.png", tmp_path / "test/007/new.png")

        [message] = load_changed(tmp_path, change)
        first, second, eighth = (PaperDataset.from_name("gtsrb").classes[n] for n in (0, 1, 7))
        assert message.endswith(
            f"is not quite the copy: class '{first}' has 1 train and 1 test images, not 1 and 2, "
            f"class '{second}' has 1 train and 3 test images, not 1 and 2, "
            f"class '{eighth}' has other files"
        )

    def test_a_missing_file(self, tmp_path, load_changed) -> None:
        [message] = load_changed(tmp_path, (tmp_path / "test/003/1.png").unlink)
        assert "has 1 train and 1 test images, not 1 and 2" in message

    def test_different_data_is_not_compared(self, tmp_path, load_changed) -> None:
        def change() -> None:
            for n in range(43):
                write_image(tmp_path / f"train/{n:03}/1.png", n)

        assert not load_changed(tmp_path, change)
