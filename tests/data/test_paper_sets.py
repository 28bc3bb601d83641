"""The paper's datasets: orders, prompts, every layout they come in, and what is wrong with one."""

import dataclasses
import io
import json
import random
import shutil
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dosapp.data.cache import CachedImages
from dosapp.data.folder import load_folder
from dosapp.data.paper_sets.datasets import PaperDataset, class_lists, file_list, load_local_copy
from dosapp.data.registry import PAPER_DATASETS, load_dataset
from dosapp.errors import InputError
from dosapp.scenario import split_dataset
from support.settings import SHARED, shared_only

SIZES = {"aircraft": 100, "cars": 196, "cifar100": 100, "cub": 200, "gtsrb": 43}


def paint(place: Path, shade: int) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (9, 8), (shade % 256, 3, 5)).save(place)


def folders(root: Path, names: list[str]) -> Path:
    """A train picture and two test pictures of each class; the shade is the class's position."""
    for n, name in enumerate(names):
        paint(root / "train" / name / "0.png", n)
        for k in range(2):
            paint(root / "test" / name / f"{k}.png", n)
    return root


@pytest.fixture
def opened(tiny):
    """A dataset from a folder, its notes about the number of pictures counted and put aside."""

    def make(name: str, place: Path):
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            data = load_dataset(name, tiny.preprocess, data_dir=place)
        assert len(notes) == 2
        assert all("cannot be compared with published ones" in str(n.message) for n in notes)
        return data

    return make


def is_right(data, known: PaperDataset) -> None:
    """Every picture has the label of the class it was painted for."""
    assert data.classes == known.order
    for part in (data.train, data.test):
        pixels = part.pictures.read(range(len(part.labels)))
        for picture, label in zip(pixels, part.labels, strict=True):
            shade = known.classes.index(data.classes[label])
            assert abs(int(picture[0].float().mean()) - shade % 256) <= 1


class TestFacts:
    def test_all_five_with_their_sizes(self) -> None:
        assert {name: len(PaperDataset.named(name).classes) for name in PAPER_DATASETS} == SIZES

    @pytest.mark.parametrize("name", PAPER_DATASETS)
    def test_the_order_is_a_shuffle_by_a_fixed_seed(self, name) -> None:
        known = PaperDataset.named(name)
        seed = {"aircraft": 0, "cars": 2, "cifar100": 2, "cub": 2, "gtsrb": 1}[name]
        positions = list(range(SIZES[name]))
        random.Random(seed).shuffle(positions)
        assert known.order == tuple(known.classes[n] for n in positions)
        assert len(set(known.order)) == SIZES[name]
        first = {  # of SPU's lists
            "aircraft": [23, 8, 11, 7, 48],
            "cars": [20, 77, 96, 166, 48],
            "cifar100": [0, 76, 61, 63, 1],
            "cub": [51, 94, 55, 35, 170],
            "gtsrb": [25, 2, 11, 1, 40],
        }
        assert positions[:5] == first[name]

    def test_prompts(self) -> None:
        counts = {name: len(PaperDataset.named(name).templates) for name in PAPER_DATASETS}
        assert counts == {"aircraft": 2, "cars": 8, "cifar100": 18, "cub": 1, "gtsrb": 3}
        assert PaperDataset.named("cars").caption == "a photo of a {}"
        assert PaperDataset.named("gtsrb").caption == "a photo of {}"

    def test_ten_tasks_have_the_papers_sizes(self, tmp_path, opened) -> None:
        data = opened("gtsrb", folders(tmp_path, [f"{n:05}" for n in range(43)]))
        sizes = [len(task.classes) for task in split_dataset(data, 10).tasks]
        assert sizes == [5, 5, 5, 4, 4, 4, 4, 4, 4, 4]


class TestLayouts:
    def test_class_folders_by_number_name_or_the_releases_name(self, tmp_path, opened) -> None:
        known = PaperDataset.named("gtsrb")
        for n, names in enumerate(
            (
                [f"{n:03}" for n in range(43)],
                [name.replace(" / ", "_or_").replace("_or_", " - ") for name in known.classes],
                [name.replace("/", "") for name in known.also],
            )
        ):
            is_right(opened("gtsrb", folders(tmp_path / str(n), names)), known)

    def test_a_tar_of_class_folders_is_read_without_unpacking(self, tmp_path, opened) -> None:
        folders(tmp_path / "gtsrb", [f"{n:03}" for n in range(43)])
        with tarfile.open(tmp_path / "gtsrb.tar", "w") as archive:
            archive.add(tmp_path / "gtsrb", "gtsrb")
        shutil.rmtree(tmp_path / "gtsrb")
        is_right(opened("gtsrb", tmp_path), PaperDataset.named("gtsrb"))

    def test_cub(self, tmp_path, opened) -> None:
        known = PaperDataset.named("cub")
        paths, labels, taught = [], [], []
        for n, name in enumerate(known.classes):
            folder = f"{n + 1:03}.{name.replace(' ', '_')}"
            for k in range(3):
                number = 3 * n + k + 1
                paint(tmp_path / "images" / folder / f"{number}.png", n)
                paths.append(f"{number} {folder}/{number}.png")
                labels.append(f"{number} {n + 1}")
                taught.append(f"{number} {int(k == 0)}")
        for name, lines in (
            ("images.txt", paths),
            ("image_class_labels.txt", labels),
            ("train_test_split.txt", taught),
        ):
            (tmp_path / name).write_text("\n".join(lines))
        is_right(opened("cub", tmp_path), known)

    def test_aircraft(self, tmp_path, opened) -> None:
        known = PaperDataset.named("aircraft")
        lists: dict[str, list[str]] = {"trainval": [], "test": []}
        for n, name in enumerate(known.classes):
            for k, part in enumerate(("trainval", "test", "test")):
                number = f"{3 * n + k:07}"
                paint(tmp_path / "data" / "images" / f"{number}.png", n)
                lists[part].append(f"{number} {name}")
        for part, lines in lists.items():
            (tmp_path / "data" / f"images_variant_{part}.txt").write_text("\n".join(lines))
        is_right(opened("aircraft", tmp_path), known)

    @pytest.mark.parametrize(
        "there", [["Training"], ["Final_Training/Images"], ["Final_Training/Images", "Training"]]
    )
    def test_gtsrb(self, there, tmp_path, opened) -> None:
        """The last of these folders is taken; the other one is all in one colour."""
        rows = ["Filename;Width;Height;ClassId"]
        for n in range(43):
            for folder in there:
                place = tmp_path / "GTSRB" / folder / f"{n:05}" / "00000_00000.ppm"
                paint(place, n if folder == there[-1] else 200)
            for k in range(2):
                paint(tmp_path / "GTSRB/Final_Test/Images" / f"{2 * n + k:05}.ppm", n)
                rows.append(f"{2 * n + k:05}.ppm;9;8;{n}")
        (tmp_path / "GTSRB" / "GT-final_test.csv").write_text("\n".join(rows))
        is_right(opened("gtsrb", tmp_path), PaperDataset.named("gtsrb"))

    def test_cifar100_binary(self, tmp_path, opened) -> None:
        for name, times in (("train", 1), ("test", 2)):
            rows = [
                bytes([0, n]) + bytes([n]) * 1024 + bytes(2048) for n in range(100) for _ in
                range(times)
            ]  # fmt: skip
            (tmp_path / f"{name}.bin").write_bytes(b"".join(rows))
        is_right(opened("cifar100", tmp_path), PaperDataset.named("cifar100"))

    def test_cars(self, tmp_path, opened) -> None:
        io = pytest.importorskip("scipy.io")
        for part, end, times in (
            ("cars_train", "train_annos", 1),
            ("cars_test", "test_annos_withlabels", 2),
        ):
            kinds = [("class", "i4"), ("fname", "U20")]
            rows = np.zeros(196 * times, dtype=kinds)
            for n in range(196):
                for k in range(times):
                    name = f"{times * n + k:05}.png"
                    paint(tmp_path / part / name, n)
                    rows[times * n + k] = (n + 1, name)
            io.savemat(tmp_path / f"cars_{end}.mat", {"annotations": rows})
        is_right(opened("cars", tmp_path), PaperDataset.named("cars"))


class TestWhatIsWrong:
    def test_nothing_there(self, tmp_path, tiny) -> None:
        with pytest.raises(InputError, match="does not exist; --data-dir takes a copy of cub"):
            load_dataset("cub", tiny.preprocess, data_dir=tmp_path / "x")

    def test_a_class_it_does_not_have(self, tmp_path, tiny) -> None:
        folders(tmp_path, [*PaperDataset.named("cifar100").classes, "unicorn"])
        with pytest.raises(InputError, match="class 'unicorn', which cifar100 does not have"):
            load_dataset("cifar100", tiny.preprocess, data_dir=tmp_path)

    def test_a_release_with_more_classes(self, tmp_path, tiny) -> None:
        rows = [bytes([0, n]) + bytes(3072) for n in range(101)]
        for name in ("train", "test"):
            (tmp_path / f"{name}.bin").write_bytes(b"".join(rows))
        with pytest.raises(InputError, match=r"train\.bin' has a label beyond the 100 classes"):
            load_dataset("cifar100", tiny.preprocess, data_dir=tmp_path)

    def test_lists_of_a_release_with_more_classes(self, tmp_path, tiny) -> None:
        paint(tmp_path / "images" / "a" / "1.png", 0)
        (tmp_path / "images.txt").write_text("1 a/1.png")
        (tmp_path / "train_test_split.txt").write_text("1 1")
        for wrong in (0, 201):
            (tmp_path / "image_class_labels.txt").write_text(f"1 {wrong}")
            with pytest.raises(InputError, match=r"1\.png' has a label beyond the 200 classes"):
                load_dataset("cub", tiny.preprocess, data_dir=tmp_path)
        for part in ("trainval", "test"):
            (tmp_path / f"images_variant_{part}.txt").write_text("1 Boeing X")
        with pytest.raises(InputError, match="class 'Boeing X', which the release does not have"):
            load_dataset("aircraft", tiny.preprocess, data_dir=tmp_path)

    def test_a_class_that_is_missing(self, tmp_path, tiny) -> None:
        folders(
            tmp_path, [name for name in PaperDataset.named("cifar100").classes if name != "bee"]
        )
        with pytest.raises(InputError, match=r"no train pictures of 1 of cifar100's 100.*'bee'"):
            load_dataset("cifar100", tiny.preprocess, data_dir=tmp_path)

    def test_a_number_too_large(self, tmp_path, tiny) -> None:
        folders(tmp_path, [f"{n:03}" for n in range(44)])
        with pytest.raises(InputError, match="class '043'; gtsrb has 43"):
            load_dataset("gtsrb", tiny.preprocess, data_dir=tmp_path)

    def test_several_that_are_missing_are_named(self, tmp_path, tiny) -> None:
        folders(tmp_path, list(PaperDataset.named("cifar100").classes[5:]))
        says = r"5 of cifar100's 100 classes: 'apple', 'aquarium fish', 'baby' and 2 more$"
        with pytest.raises(InputError, match=says):
            load_dataset("cifar100", tiny.preprocess, data_dir=tmp_path)

    def test_numbered_folders_of_something_else(self, tmp_path, tiny, opened) -> None:
        """Their numbers fit; the names that came with them do not."""
        folders(tmp_path, [f"{n:03}" for n in range(100)])
        file = tmp_path / "classes.json"
        file.write_text(json.dumps(PaperDataset.named("cifar100").classes))
        opened("cifar100", tmp_path)
        says = "100 of its 100 classes differ, for example class 0 is 'apple' .* and '707-320' in"
        with pytest.raises(InputError, match=f"is not aircraft: {says} aircraft"):
            load_dataset("aircraft", tiny.preprocess, data_dir=tmp_path)
        names = PaperDataset.named("gtsrb").also
        file.write_text(json.dumps([*names, "Unicorns"]))
        with pytest.raises(InputError, match=r"class 43 is 'Unicorns' .* and not there in gtsrb"):
            load_dataset("gtsrb", tiny.preprocess, data_dir=tmp_path)
        for text, fault in (("[", "not JSON"), ('{"apple": 0}', "not a list of class names")):
            file.write_text(text)
            with pytest.raises(InputError, match=rf"classes\.json' is {fault}"):
                load_dataset("cifar100", tiny.preprocess, data_dir=tmp_path)

    @shared_only
    def test_a_copy_of_another_dataset_is_known_by_its_files(self, tmp_path, tiny) -> None:
        with tarfile.open(SHARED / "data" / "cifar100.tar") as archive:
            archive.extractall(tmp_path, filter="data")
        (tmp_path / "cifar100" / "classes.json").unlink()
        with pytest.raises(InputError, match=r"is cifar100 \(the small subset.*\), not aircraft"):
            load_dataset("aircraft", tiny.preprocess, data_dir=tmp_path / "cifar100")

    def test_cifars_pickles_are_refused(self, tmp_path, tiny) -> None:
        for name in ("meta", "train", "test"):
            (tmp_path / name).write_bytes(b"\x80\x02")
        with pytest.raises(InputError, match="Python version, a pickle; use the binary version"):
            load_dataset("cifar100", tiny.preprocess, data_dir=tmp_path)

    def test_neither_a_copy_nor_the_hubs_library(self, tiny, monkeypatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "datasets", None)
        with pytest.raises(InputError, match=r"give --data-dir; .* pip install 'dosapp\[hub\]'"):
            load_dataset("cub", tiny.preprocess)


class TestDecodedOnce:
    def folder(self, tmp_path: Path) -> Path:
        for n in range(6):
            paint(tmp_path / "data" / "cat" / f"{n}.png", 20 * n)
        return tmp_path / "data"

    def test_the_map_is_the_pictures(self, tmp_path, tiny) -> None:
        part = load_dataset(str(self.folder(tmp_path)), tiny).train
        assert isinstance(part.pictures, CachedImages)
        files = part.pictures.source
        assert torch.equal(part.pictures.read([2, 0])[1], files.decode(0))
        assert part.pictures.key(1) == files.key(1)

    def test_the_second_time_nothing_is_decoded_or_hashed(
        self, tmp_path, tiny, monkeypatch
    ) -> None:
        place = self.folder(tmp_path)
        first = load_dataset(str(place), tiny.preprocess).train.pictures
        first.check()
        again = load_dataset(str(place), tiny.preprocess).train.pictures
        monkeypatch.setattr("dosapp.data.files.FileRef.read", lambda self: 1 / 0)
        assert torch.equal(again.read([0, 1]), first.read([0, 1]))
        assert again.key(0) == first.key(0)

    def test_a_changed_file_or_another_size_is_another_map(self, tmp_path, tiny) -> None:
        place = self.folder(tmp_path)
        first = load_dataset(str(place), tiny.preprocess).train.pictures
        before = first.read([0]).clone()
        for n in range(6):
            paint(place / "cat" / f"{n}.png", 255 - n)
        assert not torch.equal(
            load_dataset(str(place), tiny.preprocess).train.pictures.read([0]), before
        )
        tiny.image_size = 16
        assert load_dataset(str(place), tiny.preprocess).train.pictures.name != first.name

    def test_a_broken_picture_is_named_and_leaves_no_half_map(self, tmp_path, tiny) -> None:
        place = self.folder(tmp_path)
        (place / "cat" / "3.png").write_bytes(b"\x89PNG")
        data = load_dataset(str(place), tiny.preprocess)
        found = []
        for part in (data.train, data.test):
            try:
                part.pictures.check()
            except InputError as error:
                found.append(str(error))
                assert not (part.pictures.folder / f"{part.pictures.name}.npy").exists()
        assert len(found) == 1
        assert "3.png' cannot be read" in found[0]

    def test_or_is_left_out_and_counted_if_asked(self, tmp_path, tiny) -> None:
        place = self.folder(tmp_path)
        whole = load_dataset(str(place), tiny.preprocess)
        (place / "cat" / "3.png").write_bytes(b"\x89PNG")
        with pytest.warns(UserWarning, match=r"1 picture\(s\) are left out; the first: .*3\.png"):
            data = load_dataset(str(place), tiny.preprocess, skip_bad=True)
        before = len(whole.train.labels) + len(whole.test.labels)
        assert len(data.train.labels) + len(data.test.labels) == before - 1
        assert data.train.left_out + data.test.left_out == 1
        for part in (data.train, data.test):
            assert len(part.pictures.read(range(len(part.labels)))) == len(part.labels)

    def test_and_is_looked_for_once(self, tmp_path, tiny, monkeypatch) -> None:
        place = self.folder(tmp_path)
        (place / "cat" / "3.png").write_bytes(b"\x89PNG")
        for _ in range(2):
            with pytest.warns(UserWarning, match=r"1 picture\(s\) are left out"):
                data = load_dataset(str(place), tiny.preprocess, skip_bad=True)
            data.train.pictures.check()
            data.test.pictures.check()
            monkeypatch.setattr(type(data.train.pictures.source), "decode", None)  # not again

    def test_a_full_disk_is_a_sentence(self, tmp_path, tiny, monkeypatch) -> None:
        """And not the signal that a page of a map would be."""
        import errno

        def full(file, head) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        part = load_dataset(str(self.folder(tmp_path)), tiny).train
        monkeypatch.setattr("numpy.lib.format.write_array_header_1_0", full)
        with pytest.raises(InputError, match="is full; free some space"):
            part.pictures.check()
        assert not list(part.pictures.folder.glob("tmp*"))


def test_two_folders_with_the_same_names_sizes_and_times_are_two_maps(tmp_path, tiny) -> None:
    import os

    found = []
    for name, shade in (("one", 10), ("two", 200)):
        for n in range(3):
            place = tmp_path / name / "cat" / f"{n}.bmp"
            paint(place, shade)
            os.utime(place, (1, 1))
        found.append(load_dataset(str(tmp_path / name), tiny.preprocess).train.pictures.read([0]))
    assert not torch.equal(*found)


class TestOddPlaces:
    def test_hidden_files_links_and_a_readme_beside_a_wrapper(self, tmp_path, tiny) -> None:
        for n in range(4):
            paint(tmp_path / "elsewhere" / f"{n}.png", n)
            paint(tmp_path / "data" / "wrapper" / "dog" / f"{n}.png", n)
        (tmp_path / "data" / "wrapper" / "cat").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "data" / "wrapper" / "back").symlink_to(tmp_path / "data")
        (tmp_path / "data" / "README.md").write_text("x")
        paint(tmp_path / "data" / "wrapper" / "dog" / "._0.png", 1)
        data = load_dataset(str(tmp_path / "data"), tiny.preprocess)
        assert data.classes == ("cat", "dog")
        assert len(data.train.labels) + len(data.test.labels) == 8

    def test_val_is_a_test_part(self, tmp_path, tiny) -> None:
        for part in ("train", "val"):
            paint(tmp_path / part / "cat" / "0.png", 1)
            paint(tmp_path / part / "dog" / "0.png", 1)
        assert load_dataset(str(tmp_path), tiny.preprocess).classes == ("cat", "dog")

    def test_a_tar_is_the_same_as_its_folder(self, tmp_path, tiny) -> None:
        for n in range(7):
            paint(tmp_path / "pets" / "cat" / f"{n}.png", n)
        with tarfile.open(tmp_path / "pets.tar", "w") as archive:
            for n in (3, 1, 6, 0, 2, 5, 4):
                archive.add(tmp_path / "pets" / "cat" / f"{n}.png", f"./pets/cat/{n}.png")
        keys = []
        for place in (tmp_path / "pets", tmp_path / "pets.tar"):
            pictures = load_dataset(str(place), tiny.preprocess).train.pictures
            keys.append([pictures.key(n).rpartition("/")[2] for n in range(len(pictures))])
        assert keys[0] == keys[1]

    def test_a_tar_with_absolute_names(self, tmp_path, tiny) -> None:
        folders(tmp_path / "pets", ["cat", "dog"])
        with tarfile.open(tmp_path / "pets.tar", "w") as archive:
            for file in sorted((tmp_path / "pets").rglob("*.png")):
                entry = archive.gettarinfo(file)
                entry.name = f"/pets/{file.relative_to(tmp_path / 'pets')}"
                with file.open("rb") as opened:
                    archive.addfile(entry, opened)
        assert load_dataset(str(tmp_path / "pets.tar"), tiny.preprocess).classes == ("cat", "dog")

    def test_a_csv_from_a_spreadsheet_and_one_with_a_short_row(self, tmp_path, tiny) -> None:
        for n in range(3):
            paint(tmp_path / f"{n}.png", n)
        file = tmp_path / "list.csv"
        file.write_bytes(b"\xef\xbb\xbfpath,label\n0.png,a\n1.png,a\n2.png,a\n")
        assert load_dataset(str(file), tiny.preprocess).classes == ("a",)
        file.write_text("path,label,split\n0.png,a,train\n1.png,a,test\n2.png,a\n")
        with pytest.raises(InputError, match="has the split ''; use train or test"):
            load_dataset(str(file), tiny.preprocess)

    def test_a_release_with_a_missing_picture_is_a_sentence(self, tmp_path, tiny) -> None:
        (tmp_path / "data").mkdir()
        for part in ("trainval", "test"):
            (tmp_path / "data" / f"images_variant_{part}.txt").write_text("0034309 707-320")
        with pytest.raises(InputError, match="looks like the release of aircraft, but something"):
            load_dataset("aircraft", tiny.preprocess, data_dir=tmp_path)


class TestShards:
    def shard(self, place: Path, labels: list[str]) -> None:
        parts = place.parent / place.stem
        for n, label in enumerate(labels):
            paint(parts / f"{n:04}.png", n)
            (parts / f"{n:04}.cls").write_text(label)
        with tarfile.open(place, "w") as archive:
            for file in sorted(parts.iterdir()):
                archive.add(file, file.name)
        shutil.rmtree(parts)

    def test_webdataset_shards(self, tmp_path, tiny) -> None:
        self.shard(tmp_path / "train-0000.tar", ["cat", "dog", "cat"])
        self.shard(tmp_path / "train-0001.tar", ["dog"])
        self.shard(tmp_path / "test-0000.tar", ["cat", "dog"])
        data = load_dataset(str(tmp_path), tiny.preprocess)
        assert data.classes == ("cat", "dog")
        assert data.train.labels.tolist() == [0, 1, 0, 1]
        assert data.test.pictures.read([0, 1]).shape == (2, 3, 32, 32)

    def test_a_shard_is_a_test_shard_by_a_word_of_its_name(self, tmp_path, tiny) -> None:
        self.shard(tmp_path / "latest-0000.tar", ["cat", "dog", "cat", "dog"])
        self.shard(tmp_path / "pets-val-0000.tar", ["cat", "dog"])
        data = load_dataset(str(tmp_path), tiny.preprocess)
        assert (len(data.train.labels), len(data.test.labels)) == (4, 2)

    def test_a_picture_without_a_label_is_named(self, tmp_path, tiny) -> None:
        paint(tmp_path / "x" / "0.png", 1)
        paint(tmp_path / "x" / "1.png", 1)
        (tmp_path / "x" / "0.cls").write_text("cat")
        with tarfile.open(tmp_path / "a.tar", "w") as archive:
            for file in sorted((tmp_path / "x").iterdir()):
                archive.add(file, file.name)
        with pytest.raises(InputError, match=r"picture '1\.png' without a \.cls"):
            load_dataset(str(tmp_path / "a.tar"), tiny.preprocess)


@shared_only
@pytest.mark.parametrize("name", PAPER_DATASETS)
def test_the_shared_subsets_can_be_read(name, tiny, opened) -> None:
    data = opened(name, SHARED / "data")
    assert len(data.classes) == SIZES[name]
    assert data.test.pictures.read([0]).shape == (1, 3, 32, 32)
    assert np.bincount(data.train.labels).min() >= 6


class TestFileLists:
    def test_do_not_depend_on_folders_and_tell_labels_apart(self, tmp_path, tiny) -> None:
        names = [f"{n:03}" for n in range(43)]
        lists = []
        for inner in ("a", "b/c"):
            folders(tmp_path / inner, names)
            lists.append(checked_list(tmp_path / inner, tiny))
        assert lists[0] == lists[1]
        shutil.move(tmp_path / "a/test/000/1.png", tmp_path / "a/test/001/2.png")
        assert checked_list(tmp_path / "a", tiny) != lists[1]

    @shared_only
    @pytest.mark.parametrize("name", PAPER_DATASETS)
    def test_the_small_subsets_are_the_ones_we_know(self, name, tiny) -> None:
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            load_local_copy(name, SHARED / "data", tiny.preprocess)
        assert not [n for n in notes if "not quite" in str(n.message)]

    def almost(self, place: Path, net, monkeypatch, change) -> list[str]:
        """What is said of a copy of GTSRB that has changed since its list was made."""
        folders(place, [f"{n:03}" for n in range(43)])
        data = load_folder(place, net.preprocess)
        each = " ".join(class_lists(data.train, data.test))
        files = file_list(data.train, data.test)
        copy = {"name": "the copy", "train": 43, "test": 86, "files": files, "each": each}
        known = {n: PaperDataset.named(n) for n in PAPER_DATASETS}
        known["gtsrb"] = dataclasses.replace(known["gtsrb"], copies=[copy])
        monkeypatch.setattr(PaperDataset, "named", known.get)
        change()
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            load_local_copy("gtsrb", place, net.preprocess)
        return [str(note.message) for note in notes if "the copy" in str(note.message)]

    def test_other_files_in_the_same_number_are_named(self, tmp_path, tiny, monkeypatch) -> None:
        def change() -> None:
            shutil.move(tmp_path / "b/test/000/0.png", tmp_path / "b/test/001/new.png")
            shutil.move(tmp_path / "b/test/007/0.png", tmp_path / "b/test/007/new.png")

        assert not self.almost(tmp_path / "a", tiny, monkeypatch, lambda: None)
        [note] = self.almost(tmp_path / "b", tiny, monkeypatch, change)
        first, second, eighth = (PaperDataset.named("gtsrb").classes[n] for n in (0, 1, 7))
        assert note.endswith(
            f"is not quite the copy: class '{first}' has 1 train and 1 test pictures, not 1 and 2, "
            f"class '{second}' has 1 train and 3 test pictures, not 1 and 2, "
            f"class '{eighth}' has other files"
        )

    def test_a_missing_file_is_a_smaller_class(self, tmp_path, tiny, monkeypatch) -> None:
        [note] = self.almost(tmp_path, tiny, monkeypatch, (tmp_path / "test/003/1.png").unlink)
        assert "has 1 train and 1 test pictures, not 1 and 2" in note

    def test_what_is_another_thing_altogether_is_no_copy(self, tmp_path, tiny, monkeypatch) -> None:
        def change() -> None:
            for n in range(43):
                paint(tmp_path / f"train/{n:03}/1.png", n)

        assert not self.almost(tmp_path, tiny, monkeypatch, change)


def checked_list(place: Path, net) -> str:
    data = load_folder(place, net.preprocess)
    return file_list(data.train, data.test)


class TestTables:
    """Parquet files through the same library, and the same function, as the hub."""

    @pytest.fixture
    def parquet(self, tmp_path, monkeypatch):
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

        def write(labels: list[object], kind: object = None, **splits: int) -> Path:
            for part, times in splits.items():
                many = labels * times
                shades = [list(dict.fromkeys(labels)).index(label) for label in many]
                images = [Image.new("RGB", (9, 8), (shade, 3, 5)) for shade in shades]
                table = datasets.Dataset.from_dict({"image": images, "label": many})
                table = table.cast_column("image", datasets.Image())
                if kind is not None:
                    table = table.cast_column("label", kind)
                (tmp_path / "table").mkdir(exist_ok=True)
                table.to_parquet(tmp_path / "table" / f"{part}-00000-of-00001.parquet")
            return tmp_path / "table"

        return write

    def test_any_table_with_pictures_and_labels(self, parquet, tiny) -> None:
        place = parquet(["cat", "dog", "red_fox"], train=4, test=2)
        data = load_dataset(str(place), tiny.preprocess)
        assert data.classes == ("cat", "dog", "red fox")
        assert (len(data.train.labels), len(data.test.labels)) == (12, 6)
        assert isinstance(data.train.pictures, CachedImages)
        pixels = data.test.pictures.read([0, 1, 2])
        assert [int(p[0].float().mean()) for p in pixels] == data.test.labels[:3].tolist()

    def test_a_table_without_a_test_part_gives_a_third_of_each_class(self, parquet, tiny) -> None:
        data = load_dataset(str(parquet([f"c{n}" for n in range(12)], train=6)), tiny)
        assert np.bincount(data.test.labels).tolist() == [2] * 12
        assert np.bincount(data.train.labels).tolist() == [4] * 12
        assert not {data.train.pictures.key(n) for n in range(48)} & {
            data.test.pictures.key(n) for n in range(24)
        }

    def test_the_papers_tables_are_read_in_their_own_order(
        self, parquet, tiny, monkeypatch
    ) -> None:
        """From the hub the five come with names in another order than ours."""
        import datasets

        from dosapp.data.registry import hub

        known = PaperDataset.named("gtsrb")
        names = list(reversed(known.classes))
        place = parquet(names, datasets.ClassLabel(names=names), train=1, test=2)
        local = {"train": [str(place), "train"], "test": [str(place), "test"]}
        pinned = dataclasses.replace(known, hub={**known.hub, **local})
        monkeypatch.setattr(hub.PaperDataset, "named", lambda name: pinned)
        with pytest.warns(UserWarning, match="cannot be compared"):
            data = load_dataset("gtsrb", tiny.preprocess)
        assert data.classes == known.order
        shades = [int(p[0].float().mean()) for p in data.train.pictures.read(range(43))]
        assert [data.classes[n] for n in data.train.labels] == [names[s] for s in shades]

    @pytest.mark.parametrize("name", PAPER_DATASETS)
    def test_loading_scripts_are_asked_for_as_parquet(self, name, tiny, monkeypatch) -> None:
        datasets = pytest.importorskip("datasets")
        asked = []

        def refused(where: str, split: str, revision: str | None) -> None:
            asked.append((where, split, revision))
            raise OSError("offline")

        monkeypatch.setattr(datasets, "load_dataset", refused)
        with pytest.raises(InputError, match="the hub did not give it"):
            load_dataset(name, tiny.preprocess)
        scripts = {"HuggingFaceM4/FGVC-Aircraft", "alkzar90/CC6204-Hackaton-Cub-Dataset"}
        [(where, _, revision)] = asked
        assert revision == ("refs/convert/parquet" if where in scripts else None)

    def test_what_is_wrong_with_one(self, parquet, tmp_path, tiny) -> None:
        import datasets

        with pytest.raises(
            InputError, match="nobody/nothing' is not here, and the hub did not give it"
        ):
            load_dataset("nobody/nothing", tiny.preprocess)
        table = datasets.Dataset.from_dict({"text": ["a"], "label": [0]})
        (tmp_path / "words").mkdir()
        table.to_parquet(tmp_path / "words" / "train.parquet")
        with pytest.raises(InputError, match="columns text, label, but none with pictures"):
            load_dataset(str(tmp_path / "words"), tiny.preprocess)

    def test_a_table_that_was_moved_is_the_same_table(self, parquet, tmp_path, tiny) -> None:
        place = parquet(["cat", "dog"], train=4, test=2)
        shutil.copytree(place, tmp_path / "moved")
        one, two = (load_dataset(str(p), tiny.preprocess) for p in (place, tmp_path / "moved"))
        assert [one.train.pictures.key(n) for n in range(8)] == [
            two.train.pictures.key(n) for n in range(8)
        ]

    def test_labels_that_are_none_or_missing(self, parquet, tmp_path, tiny) -> None:
        import datasets

        hidden = datasets.ClassLabel(names=["a", "b"])
        place = parquet([0, 1], hidden, train=2)
        table = datasets.Dataset.from_parquet(str(place / "train-00000-of-00001.parquet"))
        unsaid = table.remove_columns("label").add_column("label", [-1] * 4)
        unsaid.to_parquet(place / "test-00000-of-00001.parquet")
        with pytest.raises(InputError, match="label -1 in row 0, which is no class"):
            load_dataset(str(place), tiny.preprocess)

    def test_a_table_beside_pictures_is_not_the_data(self, parquet, tiny) -> None:
        place = parquet(["cat", "dog"], train=4)
        for name in ("x", "y"):
            for n in range(4):
                paint(place / name / f"{n}.png", n)
        assert load_dataset(str(place), tiny.preprocess).classes == ("x", "y")

    def test_a_broken_picture_is_named_or_left_out(self, parquet, tmp_path, tiny) -> None:
        import datasets

        good = io.BytesIO()
        Image.new("RGB", (9, 8)).save(good, "PNG")
        cells = [
            {"bytes": data, "path": None} for data in (good.getvalue(), b"no", b"", good.getvalue())
        ]
        table = datasets.Dataset.from_dict({"image": cells, "label": ["a", "a", "b", "b"]})
        table = table.cast_column("image", datasets.Image())
        (tmp_path / "broken").mkdir()
        for part in ("train", "test"):
            table.to_parquet(tmp_path / "broken" / f"{part}.parquet")
        data = load_dataset(str(tmp_path / "broken"), tiny.preprocess)
        with pytest.raises(InputError, match=r"row 1 of train' cannot be read"):
            data.train.pictures.check()
        with pytest.warns(UserWarning, match=r"2 picture\(s\) are left out"):
            data = load_dataset(str(tmp_path / "broken"), tiny.preprocess, skip_bad=True)
        assert data.train.labels.tolist() == [0, 1]
