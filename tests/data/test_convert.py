"""Labelled images of other libraries become datasets; anything else is refused in one sentence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Subset, TensorDataset

from dosapp import InputError, Preprocess, as_dataset, split_dataset
from dosapp.data.inputs import read_image, stack_images

PREPROCESS = Preprocess(32, {"shortest_edge": 32}, 3)
LABELS = [0] * 6 + [1] * 6


class Squares(TorchDataset[tuple[Image.Image, int]]):
    """Six red and six blue images, as torchvision's datasets give them."""

    classes = ["red_square", "blue square"]

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> tuple[Image.Image, int]:
        color = (200 + row, 0, 0) if row < 6 else (0, 0, 200 + row)
        return Image.new("RGB", (40, 36), color), row // 6


def square_array() -> np.ndarray[Any, Any]:
    return np.stack([np.asarray(Squares()[row][0]) for row in range(12)])


def test_every_form_of_the_same_images_is_the_same_dataset() -> None:
    array, names = square_array(), ["red square", "blue square"]
    forms: list[Any] = [
        Squares(),
        (array, LABELS),
        (array.transpose(0, 3, 1, 2), np.array(LABELS)),
        ([Image.fromarray(image) for image in array], torch.tensor(LABELS)),
        {"red square": array[:6], "blue square": [Image.fromarray(a) for a in array[6:]]},
    ]
    hashes = {
        split_dataset(as_dataset(form, PREPROCESS, classes=names), tasks=2).hash for form in forms
    }
    assert len(hashes) == 1
    dataset = as_dataset(Squares(), PREPROCESS)
    assert dataset.classes == ("red square", "blue square")
    assert (len(dataset.train.labels), len(dataset.test.labels)) == (8, 4)


def test_changed_pixels_change_the_identity_of_the_data() -> None:
    array = square_array()
    before = split_dataset(as_dataset((array, LABELS), PREPROCESS, classes=["a", "b"]), 1).hash
    array[3] = 0
    after = split_dataset(as_dataset((array, LABELS), PREPROCESS, classes=["a", "b"]), 1).hash
    assert before != after


def test_a_test_part_is_used_as_it_is_by_class_name() -> None:
    array = square_array()
    dataset = as_dataset(Squares(), PREPROCESS, test={"blue square": array[6:], "red square": []})
    assert len(dataset.train.labels) == 12
    assert dataset.test.labels.tolist() == [1] * 6
    with pytest.raises(InputError, match="'green square', which has no training image"):
        as_dataset(Squares(), PREPROCESS, test={"green square": array[:2]})


def test_a_subset_has_the_class_names_of_its_dataset() -> None:
    dataset = as_dataset(Subset(Squares(), [0, 1, 2, 6, 7, 8]), PREPROCESS, hold_out=False)
    assert dataset.classes == ("red square", "blue square")
    assert (len(dataset.train.labels), len(dataset.test.labels)) == (6, 0)


def test_hugging_face_tables_are_read() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        image=datasets.Image(), label=datasets.ClassLabel(names=["red_square", "blue_square"])
    )
    images = [Squares()[row][0] for row in range(12)]
    table = datasets.Dataset.from_dict({"image": images, "label": LABELS}, features=features)
    dataset = as_dataset(table, PREPROCESS)
    assert dataset.classes == ("red square", "blue square")
    assert (len(dataset.train.labels), len(dataset.test.labels)) == (8, 4)
    both = datasets.DatasetDict(train=table, test=table)
    assert len(as_dataset(both, PREPROCESS).test.labels) == 12


def test_a_folder_written_by_save_to_disk_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    images = [Squares()[row][0] for row in range(12)]
    columns = {"image": images, "label": ["red"] * 6 + ["blue"] * 6}
    features = datasets.Features(image=datasets.Image(), label=datasets.Value("string"))
    table = datasets.Dataset.from_dict(columns, features=features)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=table).save_to_disk(tmp_path / "several")
    for name in ("one", "several"):
        dataset = as_dataset(tmp_path / name, PREPROCESS)
        assert dataset.classes == ("blue", "red")
        assert dataset.train.images.read([0]).shape == (1, 3, 32, 32)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, "data is a int; give a path, a torch Dataset"),
        ((np.zeros((2, 8, 8, 3), np.uint8), [0]), "2 images and 1 labels"),
        ((np.zeros((2, 8, 8, 3), np.uint8), [0, 1]), "numbers .* without names"),
        (TensorDataset(torch.zeros(2, 3, 8, 8)), "item 0 of the dataset is a tuple"),
        (TensorDataset(torch.zeros(2, 3, 8, 8) - 1, torch.zeros(2)), "not normalized"),
        ({"fox": [object()]}, "an image is a object"),
        ({}, "no classes"),
    ],
)
def test_other_data_is_refused_in_one_sentence(data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        as_dataset(data, PREPROCESS)


def test_labels_outside_the_classes_are_refused() -> None:
    with pytest.raises(InputError, match="a label is 1, but there are 1 classes"):
        as_dataset((square_array(), LABELS), PREPROCESS, classes=["red"])


def test_images_are_paths_arrays_or_folders(tmp_path: Path) -> None:
    Image.new("RGB", (40, 40), "red").save(tmp_path / "b.png")
    Image.new("L", (40, 40), 9).save(tmp_path / "a.png")
    (tmp_path / "notes.txt").write_text("no image")
    assert stack_images(tmp_path, PREPROCESS).shape == (2, 3, 32, 32)
    one = stack_images(str(tmp_path / "b.png"), PREPROCESS)
    assert torch.equal(one, stack_images([tmp_path / "b.png"], PREPROCESS))
    assert torch.equal(one[0], read_image(np.asarray(Image.open(tmp_path / "b.png")), PREPROCESS))
    grey = np.full((40, 40), 9 / 255, np.float32)
    assert torch.equal(read_image(grey, PREPROCESS), read_image(tmp_path / "a.png", PREPROCESS))
    with pytest.raises(InputError, match="does not exist"):
        stack_images("nowhere.png", PREPROCESS)
    with pytest.raises(InputError, match=r"shape \[5, 5, 7\]"):
        read_image(np.zeros((5, 5, 7), np.uint8), PREPROCESS)
