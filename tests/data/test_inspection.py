"""`dosapp data inspect`: counts, broken files, duplicates and a contact sheet."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from support.cli import dosapp
from support.images import BROKEN, write_shape_folders


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Class folders with a broken file, and copies in the test part and under another label."""
    root = write_shape_folders(tmp_path_factory.mktemp("own") / "photos", train=6, test=2)
    (root / "train" / "wug" / "broken.png").write_bytes(BROKEN)
    with Image.open(root / "train" / "fep" / "0.png") as image:
        image.convert("RGB").save(root / "test" / "fep" / "copy.jpg", quality=95)
        image.resize((64, 64)).save(root / "train" / "ziv" / "copy.png")
    for file in sorted((root / "train" / "toma").iterdir())[1:]:
        file.unlink()
    return root


def test_what_was_found_as_json(photos) -> None:
    found = json.loads(dosapp("data", "inspect", photos, "--json", code=1).stdout)
    assert found["classes"]["wug"] == {"train": 6, "test": 2}
    assert found["classes"]["big dax"] == {"train": 6, "test": 2}
    assert found["shorter_side"] == {"min": 32, "median": 32, "max": 64}
    assert len(found["broken"]) == 1
    assert "broken.png" in found["broken"][0]
    copies = [["train/fep/0.png", "train/ziv/copy.png", "test/fep/copy.jpg"]]
    assert found["duplicates"] == found["across_train_and_test"] == copies
    assert found["across_classes"] == copies
    assert found["imbalance"] == 7
    assert any("accuracy will be too high" in note for note in found["notes"])
    assert any("one of the labels is wrong" in note for note in found["notes"])
    assert any("7 times" in note for note in found["notes"])
    assert any("fewer than 5 training images: toma" in note for note in found["notes"])


def test_in_words_with_a_contact_sheet(photos, tmp_path) -> None:
    inspected = dosapp("data", "inspect", photos, "--sheet", tmp_path / "sheet.PNG", code=1)
    assert "1 image cannot be read" in inspected.stderr
    printed = inspected.stdout
    assert "61 images in 8 classes; shorter side 32 to 64 pixels, median 32" in printed
    assert "across train and test: 1 group\n" in printed
    assert "broken: image" in printed
    with Image.open(tmp_path / "sheet.PNG") as sheet:
        assert sheet.format == "PNG"
        assert sheet.size == (200 + 8 * 100, 8 * 100)


def test_bad_input_is_one_sentence(photos, tmp_path, monkeypatch) -> None:
    assert "is generated" in dosapp("data", "inspect", "shapes", code=2).stderr
    assert "does not exist" in dosapp("data", "inspect", tmp_path / "none", code=2).stderr
    refused = dosapp("data", "inspect", photos, "--sheet", tmp_path / "sheet.pdf", code=2)
    assert "ends with .png or .jpg" in refused.stderr
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "imagehash", None)
    assert "pip install -e '.[inspect]'" in dosapp("data", "inspect", photos, code=2).stderr
