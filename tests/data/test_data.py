"""Generated domains and one's own pictures."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dosapp.data.base import check_class_names
from dosapp.data.folder import load_folder
from dosapp.data.prefetch import prefetch
from dosapp.data.registry import SYNTHETIC, load_dataset
from dosapp.errors import InputError
from dosapp.experiments.result import Result
from support.cli import dosapp

PIXELS = 32


def prepare(image: Image.Image) -> torch.Tensor:
    data = np.array(image.resize((PIXELS, PIXELS)))
    return torch.from_numpy(data).permute(2, 0, 1)


def paint(root: Path, name: str, count: int, suffix: str = "png") -> None:
    folder = root / name
    folder.mkdir(parents=True)
    for n in range(count):
        Image.new("RGB", (20, 20), (n * 20 % 255, 80, 90)).save(folder / f"{n}.{suffix}")


@pytest.mark.parametrize("domain", SYNTHETIC.values(), ids=lambda d: d.name)
class TestGenerated:
    def test_parts_are_disjoint(self, domain) -> None:
        parts = [domain.pretraining_names, domain.benchmark_names, domain.control_names]
        names = [name for part in parts for name in part]
        assert len(names) == len(set(names))
        assert [len(p) for p in parts] == [domain.pretraining, domain.benchmark, domain.control]

    def test_every_word_of_the_benchmark_was_pretrained(self, domain) -> None:
        words = {w for name in domain.pretraining_names for w in name.split()}
        assert {w for name in domain.benchmark_names for w in name.split()} <= words

    def test_pictures_are_the_same_every_time(self, domain) -> None:
        one, two = (domain.dataset(PIXELS, train=1, test=2) for _ in range(2))
        assert torch.equal(one.test.pictures.read([0, 5]), two.test.pictures.read([0, 5]))
        assert one.train.pictures.key(3) == two.train.pictures.key(3)
        assert not torch.equal(one.train.pictures.read([0]), one.test.pictures.read([0]))


def test_class_folders_with_a_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        paint(tmp_path / split, "big_cat", 4)
        paint(tmp_path / split, "dog", 3, "jpg")
    data = load_folder(tmp_path, prepare)
    assert data.classes == ("big cat", "dog")
    assert (len(data.train.labels), len(data.test.labels)) == (7, 7)
    assert data.train.source.decode(6).shape == (3, PIXELS, PIXELS)


def test_class_folders_without_a_split_give_a_third_to_the_test(tmp_path: Path) -> None:
    paint(tmp_path, "cat", 9)
    paint(tmp_path, "dog", 9)
    data = load_folder(tmp_path, prepare)
    assert (len(data.train.labels), len(data.test.labels)) == (12, 6)


def test_csv(tmp_path: Path) -> None:
    paint(tmp_path, "pictures", 8)
    rows = ["path,label,split"]
    rows += [f"pictures/{n}.png,{'ab'[n % 2]},{'train' if n < 4 else 'test'}" for n in range(8)]
    file = tmp_path / "list.csv"
    file.write_text("\n".join(rows))
    data = load_folder(file, prepare)
    assert data.classes == ("a", "b")
    assert data.train.labels.tolist() == [0, 1, 0, 1]
    assert data.train.source.key(0).startswith("pictures/0.png:")


def test_a_pictures_key_is_its_place_and_its_bytes(tmp_path: Path) -> None:
    paint(tmp_path, "cat", 4)
    before = load_folder(tmp_path, prepare).train.source.key(0)
    file = tmp_path / before.partition(":")[0]
    Image.new("RGB", (20, 20), (1, 2, 3)).save(file)
    assert load_folder(tmp_path, prepare).train.source.key(0) != before


def test_csv_with_absolute_paths(tmp_path: Path) -> None:
    paint(tmp_path / "elsewhere", "cat", 6)
    file = tmp_path / "lists" / "list.csv"
    file.parent.mkdir()
    rows = [f"{tmp_path}/elsewhere/cat/{n}.png,cat" for n in range(6)]
    file.write_text("\n".join(["path,label", *rows]))
    data = load_folder(file, prepare)
    assert data.train.source.key(0).startswith("../elsewhere/cat/")


class TestBadData:
    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="does not exist"):
            load_folder(tmp_path / "nowhere", prepare)

    def test_no_classes(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no class folders with images"):
            load_folder(tmp_path, prepare)

    def test_truncated_image(self, tmp_path: Path) -> None:
        paint(tmp_path, "cat", 4)
        broken = tmp_path / "cat" / "2.png"
        broken.write_bytes(broken.read_bytes()[:40])
        data = load_folder(tmp_path, prepare)
        part = next(
            p for p in (data.train, data.test) if broken in [q.path for q in p.source.places]
        )
        with pytest.raises(InputError, match=r"2\.png' cannot be read"):
            [part.source.decode(row) for row in range(len(part.labels))]

    def test_a_class_in_only_one_split(self, tmp_path: Path) -> None:
        paint(tmp_path / "train", "cat", 2)
        paint(tmp_path / "train", "dog", 2)
        paint(tmp_path / "test", "cat", 2)
        with pytest.raises(InputError, match=r"'dog'.*only one of train and test"):
            load_folder(tmp_path, prepare)

    def test_csv_without_columns(self, tmp_path: Path) -> None:
        file = tmp_path / "list.csv"
        file.write_text("file,class\na.png,b\n")
        with pytest.raises(InputError, match="columns path and label"):
            load_folder(file, prepare)

    def test_csv_with_a_missing_picture_or_label(self, tmp_path: Path) -> None:
        file = tmp_path / "list.csv"
        file.write_text("path,label\na.png\n")
        with pytest.raises(InputError, match="row without a path or a label"):
            load_folder(file, prepare)
        file.write_text("path,label\na.png,a\nb.png,a\nc.png,a\n")
        with pytest.raises(InputError, match=r"\.png' cannot be read"):
            load_folder(file, prepare).train.source.key(0)

    def test_class_names(self) -> None:
        with pytest.raises(InputError, match="'cat' twice"):
            check_class_names(["cat", "dog", "cat"], "pets")
        with pytest.raises(InputError, match="empty class name"):
            check_class_names(["cat", " "], "pets")

    def test_unknown_dataset_suggests_the_nearest(self, tiny) -> None:
        with pytest.raises(InputError, match="did you mean 'shapes'"):
            load_dataset("shaps", tiny.preprocess)


class TestBadPicturesInARun:
    @pytest.fixture
    def words(self, tmp_path: Path) -> list[object]:
        for name in ("cat", "dog", "emu"):
            paint(tmp_path / "pets" / "train", name, 4)
            paint(tmp_path / "pets" / "test", name, 4)
        for broken in ("train/emu/2.png", "test/cat/0.png", "test/dog/3.png"):
            (tmp_path / "pets" / broken).write_bytes(b"\x89PNG")
        return ["run", "--data", "pets", "--tasks", 3, "--epochs", 1, "--batch", 4, "--out", "x"]

    def test_it_stops_before_it_learns_and_names_one(self, words, tmp_path: Path) -> None:
        done = dosapp(*words, cwd=tmp_path, code=2)
        assert "train/emu/2.png' cannot be read" in done.stderr
        assert done.stderr.count("\n") == 1
        assert not (tmp_path / "x").exists()

    def test_or_leaves_them_out_and_counts_them(self, words, tmp_path: Path) -> None:
        done = dosapp(*words, "--skip-bad-images", cwd=tmp_path)
        assert "1 picture(s) are left out; the first: image" in done.stderr
        assert "2 picture(s) are left out; the first: image" in done.stderr
        assert "test/cat/0.png' cannot be read" in done.stderr
        tasks = Result.read(tmp_path / "x").tasks
        assert [task["train"] for task in tasks] == [4, 4, 3]
        assert [task["stream"] + task["test"] for task in tasks] == [3, 3, 4]


class TestAhead:
    def test_in_order_and_never_more_than_one_too_early(self) -> None:
        read: list[int] = []
        for key, found in prefetch(range(5), lambda n: read.append(n) or n * n):
            assert found == key * key
            assert max(read) <= key + 1
        assert read == [0, 1, 2, 3, 4]

    def test_an_error_comes_when_its_turn_comes(self) -> None:
        found = prefetch([2, 1, 0], lambda n: 2 // n)
        assert [next(found), next(found)] == [(2, 1), (1, 2)]
        with pytest.raises(ZeroDivisionError):
            next(found)

    def test_who_stops_early_leaves_no_thread_behind(self) -> None:
        found = prefetch(range(9), lambda n: n)
        next(found)
        found.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("ahead")]
