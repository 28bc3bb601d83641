"""A user's own images: class folders, tar archives, CSV files, WebDataset shards."""

import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from dosapp.data.files import FileRef, decode_zip_name, list_files, open_image
from dosapp.data.folder import load_folder, read_task_groups
from dosapp.data.registry import load_dataset
from dosapp.errors import InputError
from dosapp.experiments.plan import build_scenario
from dosapp.experiments.result import Result
from dosapp.scenario import split_dataset
from dosapp.settings import RunSettings
from support.cli import dosapp
from support.images import BROKEN, PREPROCESS, write_class_folders, write_image, write_images
from support.settings import SHARED, shared_only


class TestClassFolders:
    def test_with_a_split(self, tmp_path: Path) -> None:
        for split in ("train", "test"):
            write_images(tmp_path / split / "big_cat", 4)
            write_images(tmp_path / split / "dog", 3, "jpg")
        data = load_folder(tmp_path)
        assert data.classes == ("big cat", "dog")
        assert (len(data.train.labels), len(data.test.labels)) == (7, 7)
        assert data.train.images.open(6).size == (9, 8)

    def test_without_a_split_a_third_is_tested(self, tmp_path: Path) -> None:
        write_images(tmp_path / "cat", 9)
        write_images(tmp_path / "dog", 9)
        data = load_folder(tmp_path)
        assert (len(data.train.labels), len(data.test.labels)) == (12, 6)

    def test_val_is_a_test_split(self, tmp_path: Path) -> None:
        for split in ("train", "val"):
            write_image(tmp_path / split / "cat" / "0.png")
            write_image(tmp_path / split / "dog" / "0.png")
        assert load_folder(tmp_path).classes == ("cat", "dog")

    def test_key_has_relative_name_and_content(self, tmp_path: Path) -> None:
        write_images(tmp_path / "cat", 4)
        before = load_folder(tmp_path).train.images.key(0)
        Image.new("RGB", (9, 8), (1, 2, 3)).save(tmp_path / before.partition(":")[0])
        after = load_folder(tmp_path).train.images.key(0)
        assert after != before
        assert after.partition(":")[0] == before.partition(":")[0]

    def test_hidden_files_links_and_a_readme_beside_an_outer_folder(self, tmp_path: Path) -> None:
        write_images(tmp_path / "elsewhere", 4)
        write_images(tmp_path / "data" / "outer" / "dog", 4)
        (tmp_path / "data" / "outer" / "cat").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "data" / "outer" / "back").symlink_to(tmp_path / "data")
        (tmp_path / "data" / "README.md").write_text("x")
        write_image(tmp_path / "data" / "outer" / "dog" / "._0.png")
        data = load_folder(tmp_path / "data")
        assert data.classes == ("cat", "dog")
        assert len(data.train.labels) + len(data.test.labels) == 8


class TestTars:
    def test_a_tar_has_the_keys_of_its_folder(self, tmp_path: Path) -> None:
        write_images(tmp_path / "pets" / "cat", 7)
        with tarfile.open(tmp_path / "pets.tar", "w") as archive:
            for n in (3, 1, 6, 0, 2, 5, 4):
                archive.add(tmp_path / "pets" / "cat" / f"{n}.png", f"./pets/cat/{n}.png")
        keys = []
        for path in (tmp_path / "pets", tmp_path / "pets.tar"):
            images = load_folder(path).train.images
            keys.append([images.key(n).rpartition("/")[2] for n in range(len(images))])
        assert keys[0] == keys[1]

    def test_absolute_names(self, tmp_path: Path) -> None:
        write_class_folders(tmp_path / "pets", ["cat", "dog"])
        with tarfile.open(tmp_path / "pets.tar", "w") as archive:
            for path in sorted((tmp_path / "pets").rglob("*.png")):
                entry = archive.gettarinfo(path)
                entry.name = f"/pets/{path.relative_to(tmp_path / 'pets')}"
                with path.open("rb") as file:
                    archive.addfile(entry, file)
        assert load_folder(tmp_path / "pets.tar").classes == ("cat", "dog")

    @pytest.mark.parametrize("links", [[], ["cat/0.png"]])
    def test_a_member_of_negative_size_is_refused(self, tmp_path: Path, links) -> None:
        """`tarfile` would read the first member again and again."""
        path = tmp_path / "pets.tar"
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
            archive.addfile(tarfile.TarInfo("cat/0.png"))
            for target in links:  # a link makes `tarfile` read the whole archive
                entry = tarfile.TarInfo("cat/1.png")
                entry.type, entry.linkname = tarfile.LNKTYPE, target
                archive.addfile(entry)
            entry = tarfile.TarInfo("cat/2.png")
            entry.size = -1024
            archive.addfile(entry)
        with pytest.raises(InputError, match=r"\('cat/2.png' has a negative size\)"):
            list_files(path)

    def test_a_malformed_header_is_not_the_end(self, tmp_path: Path) -> None:
        path = tmp_path / "pets.tar"
        with tarfile.open(path, "w") as archive:
            for n in range(3):
                archive.addfile(tarfile.TarInfo(f"cat/{n}.png"))
        data = bytearray(path.read_bytes())
        data[512] ^= 1  # the second name no longer fits its checksum
        path.write_bytes(data)
        with pytest.raises(InputError, match="the header at byte 512 is malformed"):
            list_files(path)


class TestCSV:
    def test_with_a_split(self, tmp_path: Path) -> None:
        write_images(tmp_path / "images", 8)
        rows = ["path,label,split"]
        rows += [f"images/{n}.png,{'ab'[n % 2]},{'train' if n < 4 else 'test'}" for n in range(8)]
        (tmp_path / "list.csv").write_text("\n".join(rows))
        data = load_folder(tmp_path / "list.csv")
        assert data.classes == ("a", "b")
        assert data.train.labels.tolist() == [0, 1, 0, 1]
        assert data.train.images.key(0).startswith("images/0.png:")

    def test_absolute_paths(self, tmp_path: Path) -> None:
        write_images(tmp_path / "elsewhere" / "cat", 6)
        file = tmp_path / "lists" / "list.csv"
        file.parent.mkdir()
        rows = [f"{tmp_path}/elsewhere/cat/{n}.png,cat" for n in range(6)]
        file.write_text("\n".join(["path,label", *rows]))
        assert load_folder(file).train.images.key(0).startswith("../elsewhere/cat/")

    def test_from_a_spreadsheet_and_with_a_short_row(self, tmp_path: Path) -> None:
        write_images(tmp_path, 3)
        file = tmp_path / "list.csv"
        file.write_bytes(b"\xef\xbb\xbfpath,label\n0.png,a\n1.png,a\n2.png,a\n")
        assert load_folder(file).classes == ("a",)
        file.write_text("path,label,split\n0.png,a,train\n1.png,a,test\n2.png,a\n")
        with pytest.raises(InputError, match="has the split ''; use train or test"):
            load_folder(file)

    def test_without_columns(self, tmp_path: Path) -> None:
        file = tmp_path / "list.csv"
        file.write_text("file,class\na.png,b\n")
        (tmp_path / "notes.txt").write_text("a,b\n1,2\n")
        with pytest.raises(InputError, match="or is no data: give a folder, tar or zip"):
            load_folder(tmp_path / "notes.txt")
        with pytest.raises(InputError, match=r"columns path and label, and some rows$"):
            load_folder(file)

    def test_a_missing_label_or_image(self, tmp_path: Path) -> None:
        file = tmp_path / "list.csv"
        file.write_text("path,label\na.png\n")
        with pytest.raises(InputError, match="row without a path or a label"):
            load_folder(file)
        file.write_text("path,label\na.png,a\nb.png,a\nc.png,a\n")
        with pytest.raises(InputError, match=r"\.png' cannot be read"):
            load_folder(file).train.images.key(0)


class TestShards:
    def write_shard(self, path: Path, labels: list[str]) -> None:
        folder = path.parent / path.stem
        for n, label in enumerate(labels):
            write_image(folder / f"{n:04}.png", n)
            (folder / f"{n:04}.cls").write_text(label)
        with tarfile.open(path, "w") as archive:
            for file in sorted(folder.iterdir()):
                archive.add(file, file.name)
        shutil.rmtree(folder)

    def test_webdataset_shards(self, tmp_path: Path) -> None:
        self.write_shard(tmp_path / "train-0000.tar", ["cat", "dog", "cat"])
        self.write_shard(tmp_path / "train-0001.tar", ["dog"])
        self.write_shard(tmp_path / "test-0000.tar", ["cat", "dog"])
        data = load_dataset(str(tmp_path), PREPROCESS)
        assert data.classes == ("cat", "dog")
        assert data.train.labels.tolist() == [0, 1, 0, 1]
        assert data.test.images.read([0, 1]).shape == (2, 3, 32, 32)

    def test_a_test_shard_is_recognized_by_a_word_of_its_name(self, tmp_path: Path) -> None:
        self.write_shard(tmp_path / "latest-0000.tar", ["cat", "dog", "cat", "dog"])
        self.write_shard(tmp_path / "pets-val-0000.tar", ["cat", "dog"])
        data = load_folder(tmp_path)
        assert (len(data.train.labels), len(data.test.labels)) == (4, 2)

    def test_an_image_without_a_label_is_named(self, tmp_path: Path) -> None:
        write_images(tmp_path / "x", 2)
        (tmp_path / "x" / "0.cls").write_text("cat")
        with tarfile.open(tmp_path / "a.tar", "w") as archive:
            for file in sorted((tmp_path / "x").iterdir()):
                archive.add(file, file.name)
        with pytest.raises(InputError, match=r"image '1\.png' without a \.cls"):
            load_folder(tmp_path / "a.tar")


class TestBadFolders:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="does not exist"):
            load_folder(tmp_path / "nowhere")

    def test_no_classes(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no class folders with images"):
            load_folder(tmp_path)

    def test_truncated_image(self, tmp_path: Path) -> None:
        broken = write_images(tmp_path / "cat", 4) / "2.png"
        broken.write_bytes(broken.read_bytes()[:40])
        data = load_folder(tmp_path)
        with pytest.raises(InputError, match=r"2\.png' cannot be read"):
            [
                split.images.open(row)
                for split in (data.train, data.test)
                for row in range(len(split.labels))
            ]

    def test_only_usual_formats_are_opened_whatever_the_name(self, tmp_path, monkeypatch) -> None:
        """To read an EPS file, Pillow would start Ghostscript."""
        started: list[object] = []
        monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: started.append(1))
        path = tmp_path / "0.png"
        Image.new("RGB", (8, 8)).save(path, "EPS")
        with pytest.raises(InputError, match=r"0\.png' cannot be read \(it is not in the format"):
            open_image(FileRef(path))
        assert not started

    def test_a_class_in_only_one_split(self, tmp_path: Path) -> None:
        write_images(tmp_path / "train" / "cat", 2)
        write_images(tmp_path / "train" / "dog", 2)
        write_images(tmp_path / "test" / "cat", 2)
        with pytest.raises(InputError, match=r"'dog'.*only one of train and test"):
            load_folder(tmp_path)


class TestUnreadableImagesInARun:
    @pytest.fixture
    def arguments(self, tmp_path: Path) -> list[object]:
        for name in ("cat", "dog", "emu"):
            write_images(tmp_path / "pets" / "train" / name, 4)
            write_images(tmp_path / "pets" / "test" / name, 4)
        for broken in ("train/emu/2.png", "test/cat/0.png", "test/dog/3.png"):
            (tmp_path / "pets" / broken).write_bytes(BROKEN)
        return ["run", "--data", "pets", "--tasks", 3, "--epochs", 1, "--batch-size", 4]

    def test_the_first_is_named_before_training(self, arguments, tmp_path: Path) -> None:
        result = dosapp(*arguments, "--out", "x", cwd=tmp_path, code=2)
        assert "train/emu/2.png' cannot be read" in result.stderr
        assert result.stderr.count("\n") == 1
        assert not (tmp_path / "x").exists()

    def test_or_they_are_skipped_and_counted(self, arguments, tmp_path: Path) -> None:
        result = dosapp(*arguments, "--out", "x", "--skip-bad-images", cwd=tmp_path)
        assert "1 image skipped; the first: image" in result.stderr
        assert "2 images skipped; the first: image" in result.stderr
        assert "test/cat/0.png' cannot be read" in result.stderr
        tasks = Result.read(tmp_path / "x").tasks
        assert [task["train"] for task in tasks] == [4, 4, 3]
        assert [task["stream"] + task["test"] for task in tasks] == [3, 3, 4]


class TestNumberedFolders:
    def test_are_named_by_classes_json(self, tmp_path: Path) -> None:
        write_images(tmp_path / "train" / "000", 3)
        write_images(tmp_path / "train" / "001", 3)
        shutil.copytree(tmp_path / "train", tmp_path / "test")
        (tmp_path / "classes.json").write_text('["red fox", "owl"]')
        assert load_folder(tmp_path).classes == ("red fox", "owl")
        (tmp_path / "classes.json").write_text('["red fox"]')
        with pytest.raises(InputError, match=r"has 1 names, counted from 0, and none .* '001'"):
            load_folder(tmp_path)

    def test_without_names_are_announced(self, tmp_path: Path) -> None:
        write_images(tmp_path / "000", 3)
        with pytest.warns(UserWarning, match=r"are numbers \('000', …\), which mean nothing"):
            load_folder(tmp_path)

    @shared_only
    def test_a_subset_of_the_paper_is_a_plain_dataset(self) -> None:
        data = load_folder(SHARED / "data" / "gtsrb.tar")
        assert len(data.classes) == 43
        assert not any(name.isdecimal() for name in data.classes)


def test_a_misspelled_folder_is_suggested(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="unknown dataset 'photo'; did you mean 'photos'"):
        load_dataset("photo", PREPROCESS)
    with pytest.raises(InputError, match="unknown dataset 'shape'; did you mean 'shapes'"):
        load_dataset("shape", PREPROCESS)


class TestLeftOut:
    def test_folders_without_images_are_named(self, tmp_path: Path) -> None:
        write_images(tmp_path / "cat", 3)
        (tmp_path / "dog").mkdir()
        (tmp_path / "owl").mkdir()
        (tmp_path / "owl" / "notes.txt").write_text("x")
        with pytest.warns(UserWarning, match="they hold no images: 'dog', 'owl'"):
            assert load_folder(tmp_path).classes == ("cat",)

    def test_images_in_other_formats_are_counted(self, tmp_path: Path) -> None:
        write_images(tmp_path / "cat", 3)
        for name in ("IMG_1.HEIC", "IMG_2.heic", "raw.dng", "notes.txt"):
            (tmp_path / "cat" / name).write_bytes(b"")
        with pytest.warns(UserWarning, match=r"1 \.dng file, 2 \.heic files; convert these"):
            assert len(load_folder(tmp_path, hold_out=False).train.labels) == 3

    def test_a_folder_that_cannot_be_read_is_an_error(self, tmp_path: Path, monkeypatch) -> None:
        write_images(tmp_path / "cat", 3)
        write_images(tmp_path / "dog", 3)
        scan = os.scandir

        def refuse_dog(path: str) -> object:
            if Path(path).name == "dog":
                raise PermissionError(13, "Permission denied", str(path))
            return scan(path)

        monkeypatch.setattr(os, "scandir", refuse_dog)
        with pytest.raises(InputError, match=r"dog' cannot be read \(Permission denied\)"):
            list_files(tmp_path)


class TestZips:
    def test_a_zip_has_the_images_of_its_folder(self, tmp_path: Path) -> None:
        for name in ("cat", "Füchse"):
            write_images(tmp_path / "pets" / name, 4)
        file = shutil.make_archive(str(tmp_path / "pets"), "zip", tmp_path / "pets")
        data, folder = load_folder(Path(file)), load_folder(tmp_path / "pets")
        assert data.classes == ("Füchse", "cat")
        assert data.train.images.key(1) == folder.train.images.key(1)
        assert data.train.images.open(1).tobytes() == folder.train.images.open(1).tobytes()
        assert load_dataset(file, PREPROCESS).train.images.read([0]).shape == (1, 3, 32, 32)

    def test_a_name_without_the_flag_of_utf8(self) -> None:
        member = zipfile.ZipInfo("Füchse/0.png".encode().decode("cp437"))
        assert decode_zip_name(member) == "Füchse/0.png"

    def test_names_never_become_paths_and_large_files_are_refused(
        self, tmp_path: Path, monkeypatch
    ) -> None:
        write_images(tmp_path / "pets" / "cat", 3)
        with zipfile.ZipFile(tmp_path / "pets.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for n in range(3):
                archive.write(tmp_path / "pets" / "cat" / f"{n}.png", f"/cat/{n}.png")
            archive.writestr("../../evil/0.png", b"x")
        data = load_folder(tmp_path / "pets.zip")
        assert data.classes == ("cat",)  # a hidden folder, as .. is, has no images
        monkeypatch.setattr("dosapp.data.files.MAX_MEMBER", 5)
        with pytest.raises(InputError, match="has more than 5 bytes"):
            data.train.images.open(0)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("pets.tar.gz", r"is compressed.*mkdir pets && tar -xf .*pets.tar.gz -C pets"),
            ("pets.zip", "is not a zip archive"),
            ("pets.tar", "if it is compressed, unpack it"),
        ],
    )
    def test_other_archives_say_what_to_do(self, tmp_path: Path, name, message) -> None:
        (tmp_path / name).write_bytes(b"\x1f\x8b no archive")
        with pytest.raises(InputError, match=message):
            load_folder(tmp_path / name)


class TestTaskColumn:
    def write_csv(self, path: Path, dates: dict[str, str]) -> Path:
        rows = ["path,label,date"]
        for name, date in dates.items():
            write_images(path / name, 6)
            rows += [f"{name}/{n}.png,{name},{date}" for n in range(6)]
        rows[-1] = rows[-1].rpartition(",")[0] + ",2027-01"  # a later image of the last class
        (path / "data.csv").write_text("\n".join(rows))
        return path / "data.csv"

    def test_classes_that_begin_together_are_a_task(self, tmp_path: Path) -> None:
        dates = {"owl": "2026-05", "big_cat": "2026-03", "dog": "2026-05", "fox": "2026-03"}
        file = self.write_csv(tmp_path, dates)
        settings = RunSettings(data=str(file), task_column="date")
        scenario = build_scenario(settings, PREPROCESS)
        assert [task.classes for task in scenario.tasks] == [("big cat", "fox"), ("dog", "owl")]

    def test_numbers_are_in_the_order_of_numbers(self, tmp_path: Path) -> None:
        file = tmp_path / "data.csv"
        file.write_text("path,label,session\na.png,owl,10\nb.png,fox,2\n")
        assert read_task_groups(file, "session") == [["fox"], ["owl"]]
        with pytest.raises(InputError, match="columns path, label, session, but no 'date'"):
            read_task_groups(file, "date")
        with pytest.raises(InputError, match="is no CSV"):
            read_task_groups(tmp_path, "date")


class TestClassOrder:
    def test_suggestions_underscores_and_what_is_left_out(self, tmp_path: Path) -> None:
        for name in ("red_fox", "owl", "dog"):
            write_images(tmp_path / name, 6)
        data = load_dataset(tmp_path, PREPROCESS)
        order = split_dataset(data, 3, order=["red_fox", "owl", "dog"]).classes
        assert order == ("red fox", "owl", "dog")
        with pytest.raises(
            InputError, match=r"'red foks', which .* does not have; did you mean 'red fox'"
        ):
            split_dataset(data, 3, order=["red foks", "owl", "dog"])
        file = tmp_path / "order.yaml"
        file.write_text("[[owl], [red_fox]]")
        settings = RunSettings(data=str(tmp_path), class_order=file)
        with pytest.warns(UserWarning, match="names 2 of the 3 classes of .* left out: 'dog'"):
            build_scenario(settings, PREPROCESS)
