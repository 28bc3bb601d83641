"""The cache of decoded images."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dosapp.data.cache import CachedImages, cache_folder
from dosapp.data.registry import load_dataset
from dosapp.errors import InputError, StorageError
from support.images import BROKEN, PREPROCESS, write_image, write_images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset with six images of one class."""
    write_images(tmp_path / "data" / "cat", 6)
    return tmp_path / "data"


def load(folder: Path, **changes: bool):
    return load_dataset(str(folder), PREPROCESS, **changes)


class TestDecodedOnce:
    def test_cached_images_are_the_preprocessed_ones(self, folder) -> None:
        images = load(folder).train.images
        assert isinstance(images, CachedImages)
        assert torch.equal(images.read([2, 0])[1], PREPROCESS(images.source.open(0)))
        assert images.key(1) == images.source.key(1)

    def test_the_second_time_nothing_is_decoded_or_hashed(self, folder, monkeypatch) -> None:
        first = load(folder).train.images
        first.check()
        second = load(folder).train.images
        monkeypatch.setattr("dosapp.data.files.FileRef.read", lambda self: 1 / 0)
        assert torch.equal(second.read([0, 1]), first.read([0, 1]))
        assert second.key(0) == first.key(0)

    def test_a_changed_file_or_other_preprocessing_is_another_cache_file(self, folder) -> None:
        first = load(folder).train.images
        before = first.read([0]).clone()
        for n in range(6):
            write_image(folder / "cat" / f"{n}.png", 255 - n)
        assert not torch.equal(load(folder).train.images.read([0]), before)
        smaller = load_dataset(str(folder), replace(PREPROCESS, image_size=16)).train.images
        assert smaller.name != load(folder).train.images.name != first.name
        assert smaller.read([0]).shape == (1, 3, 16, 16)

    def test_two_folders_with_equal_names_sizes_and_times_are_two_files(self, tmp_path) -> None:
        pixels = []
        for name, red in (("first", 10), ("second", 200)):
            for n in range(3):
                path = tmp_path / name / "cat" / f"{n}.bmp"
                write_image(path, red)
                os.utime(path, (1, 1))
            pixels.append(load(tmp_path / name).train.images.read([0]))
        assert not torch.equal(*pixels)

    def test_a_full_disk_is_a_storage_error(self, folder, monkeypatch) -> None:
        """And not a signal, as writing to a page of a memory map would be."""

        def fail(file, header) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        images = load(folder).train.images
        monkeypatch.setattr("numpy.lib.format.write_array_header_1_0", fail)
        with pytest.raises(StorageError, match="is full; free some space"):
            images.check()
        assert not list(images.folder.glob("tmp*"))


class TestUnreadableImages:
    @pytest.fixture(autouse=True)
    def broken(self, folder) -> None:
        (folder / "cat" / "3.png").write_bytes(BROKEN)

    def test_is_named_and_leaves_no_incomplete_file(self, folder) -> None:
        data = load(folder)
        messages = []
        for split in (data.train, data.test):
            try:
                split.images.check()
            except InputError as error:
                messages.append(str(error))
                assert not (split.images.folder / f"{split.images.name}.npy").exists()
        assert len(messages) == 1
        assert "3.png' cannot be read" in messages[0]

    def test_is_skipped_and_counted_on_request(self, folder) -> None:
        with pytest.warns(UserWarning, match=r"1 image skipped; the first: .*3\.png"):
            data = load(folder, skip_bad=True)
        assert len(data.train.labels) + len(data.test.labels) == 5
        assert data.train.skipped + data.test.skipped == 1
        for split in (data.train, data.test):
            assert len(split.images.read(range(len(split.labels)))) == len(split.labels)

    def test_is_searched_for_once(self, folder, monkeypatch) -> None:
        for _ in range(2):
            with pytest.warns(UserWarning, match=r"1 image skipped"):
                data = load(folder, skip_bad=True)
            data.train.images.check()
            data.test.images.check()
            monkeypatch.setattr(type(data.train.images.source), "open", None)


def test_a_cache_of_an_earlier_version_is_used(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DOSAPP_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path / "images"
    (tmp_path / "pictures").mkdir()
    assert cache_folder() == tmp_path / "pictures"


class TestEviction:
    """The least recently used files are deleted beyond `DOSAPP_CACHE_GB`."""

    @pytest.fixture
    def datasets(self, tmp_path, monkeypatch) -> list[Path]:
        """Three datasets; each has one cache file of four training images, and one of two."""
        monkeypatch.setenv("DOSAPP_CACHE", str(tmp_path / "cache"))
        return [write_images(tmp_path / name / "cat", 6).parent for name in ("a", "b", "c")]

    def decode(self, folder: Path, used: int) -> CachedImages:
        """Decode the training images, and set the time of their last use."""
        images = load(folder).train.images
        images.check()
        os.utime(self.file(images), (used, used))
        return images

    def file(self, images: CachedImages) -> Path:
        return images.folder / f"{images.name}.npy"

    def exist(self, *images: CachedImages) -> list[bool]:
        return [self.file(each).exists() for each in images]

    def test_the_least_recently_used_is_deleted(self, datasets, monkeypatch) -> None:
        a, b = (self.decode(folder, used) for folder, used in zip(datasets, (2, 1), strict=False))
        size = self.file(a).stat().st_size
        monkeypatch.setenv("DOSAPP_CACHE_GB", str(2.5 * size / 1e9))
        c = self.decode(datasets[2], 3)
        assert self.exist(a, b, c) == [True, False, True]
        assert not self.file(b).with_suffix(".json").exists()

    def test_reading_is_a_use(self, datasets, monkeypatch) -> None:
        a, b = (self.decode(folder, used) for folder, used in zip(datasets, (1, 2), strict=False))
        load(datasets[0]).train.images.read([0])
        size = self.file(a).stat().st_size
        monkeypatch.setenv("DOSAPP_CACHE_GB", str(2.5 * size / 1e9))
        c = self.decode(datasets[2], 3)
        assert self.exist(a, b, c) == [True, False, True]

    def test_the_file_just_written_is_never_deleted(self, datasets, monkeypatch) -> None:
        monkeypatch.setenv("DOSAPP_CACHE_GB", "1e-9")
        a = self.decode(datasets[0], 2)
        b = self.decode(datasets[1], 1)
        assert self.exist(a, b) == [False, True]
        assert b.read([0]).shape == (1, 3, 32, 32)

    def test_deleted_images_can_still_be_read(self, datasets, monkeypatch) -> None:
        """Through an open memory map, and by decoding them again."""
        a = self.decode(datasets[0], 1)
        before = a.read([0, 1]).clone()
        monkeypatch.setenv("DOSAPP_CACHE_GB", "1e-9")
        self.decode(datasets[1], 2)
        assert self.exist(a) == [False]
        assert torch.equal(a.read([0, 1]), before)
        assert torch.equal(load(datasets[0]).train.images.read([0, 1]), before)

    def test_without_a_setting_all_stay(self, datasets, monkeypatch) -> None:
        monkeypatch.delenv("DOSAPP_CACHE_GB", raising=False)
        images = [self.decode(folder, 1) for folder in datasets]
        assert all(self.exist(*images))

    def test_a_limit_that_is_no_number(self, datasets, monkeypatch) -> None:
        monkeypatch.setenv("DOSAPP_CACHE_GB", "lots")
        with pytest.raises(InputError, match="DOSAPP_CACHE_GB is 'lots'; give a number"):
            load(datasets[0]).train.images.check()
