"""`dosapp doctor` finds what is wrong, and says that all is fine where it is."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from dosapp.backbones.names import TINY
from dosapp.data.cache import list_cache
from dosapp.data.preprocess import to_float
from dosapp.data.registry import load_dataset
from dosapp.doctor.class_names import check_classes, find_repeated, find_similar, find_swapped
from dosapp.doctor.machine import check_disk, check_threads
from dosapp.doctor.model import check_backbone
from support.cli import dosapp
from support.images import write_class_folders


@pytest.fixture(scope="module")
def shapes(loaded_tiny):
    return load_dataset("shapes", loaded_tiny.preprocess, train_images=1, test_images=6)


def write_folder(folder, shapes, names: dict[int, str]) -> None:
    """Images of some classes as class folders, under other names."""
    for label, name in names.items():
        (folder / name).mkdir(parents=True)
        for n, row in enumerate(np.flatnonzero(shapes.test.labels == label)):
            pixels = shapes.test.images.read([row])[0].permute(1, 2, 0)
            Image.fromarray(pixels.numpy()).save(folder / name / f"{n}.png")


def test_the_embedded_backbone_and_dataset_are_fine(loaded_tiny, shapes) -> None:
    _, findings = check_backbone("tiny")
    assert findings[0].facts["fingerprint"] == loaded_tiny.fingerprint()
    assert findings[0].facts["activation"] == {"vision": "quick_gelu", "text": "quick_gelu"}
    findings += check_classes(shapes, loaded_tiny)
    assert [f.message for f in findings if f.status == "problem"] == []


@torch.no_grad()
def test_swapped_labels_are_named(loaded_tiny, shapes, tmp_path) -> None:
    """The two best recognised of six classes have each other's name."""
    texts = loaded_tiny.encode_text([shapes.prompts.caption(n) for n in shapes.classes])
    images = loaded_tiny.encode_image(to_float(shapes.test.images.read(range(600))))
    right = (images @ texts.T).argmax(dim=1).numpy() == shapes.test.labels
    best = np.argsort(np.bincount(shapes.test.labels, right))[::-1][:6].tolist()
    names = {label: shapes.classes[label] for label in best}
    names[best[0]], names[best[1]] = names[best[1]], names[best[0]]
    write_folder(tmp_path / "data", shapes, names)
    output = dosapp("doctor", "--data", tmp_path / "data", "--json", cwd=tmp_path, code=1).stdout
    found = {f["check"]: f for f in json.loads(output)["findings"]}
    [pair] = found["labels"]["facts"]["groups"]
    assert set(pair) == {names[best[0]], names[best[1]]}


def test_a_local_copy_of_a_named_dataset_is_checked(tmp_path) -> None:
    write_class_folders(tmp_path / "gtsrb", [f"{n:03}" for n in range(43)])
    # The exit code is 1: 'tiny' reads names of traffic signs as nearly the same.
    output = dosapp("doctor", "--data", "gtsrb", "--data-dir", tmp_path, "--json", code=1).stdout
    found = {f["check"]: f for f in json.loads(output)["findings"]}
    assert found["class names"]["message"] == "43 names, none repeated"


def test_repeated_and_similar_names_are_named() -> None:
    assert find_repeated(("Red_fox", "red fox", "owl")).facts["groups"] == [["Red_fox", "red fox"]]
    texts = torch.nn.functional.normalize(torch.tensor([[1.0, 0], [0, 1], [1, 0.01]]), dim=1)
    assert find_similar(("a", "b", "c"), texts).facts["groups"] == [["a", "c"]]
    assert find_swapped(("a", "b"), np.array([[1, 9], [3, 7]])).status == "ok"


def test_a_wrong_preprocessing_and_a_missing_backbone_are_problems(tmp_path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"crop_size": 24}))
    _, findings = check_backbone(str(folder))
    assert [f.check for f in findings if f.status == "problem"] == ["preprocessing"]
    backbone, [finding] = check_backbone(str(tmp_path / "nowhere"))
    assert backbone is None
    assert "does not exist" in finding.message


def test_a_full_disk_and_too_many_threads_are_problems(monkeypatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert check_disk().status == "problem"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    assert "OMP_NUM_THREADS" in check_threads().message


BROKEN_TORCHVISION = """
from dosapp.backbones.checkpoint import import_transformers
from dosapp.doctor.machine import check_torchvision
from dosapp.errors import InputError
print(check_torchvision().message)
try:
    library = import_transformers()
    library.SiglipModel, library.Siglip2Model, library.VisionTextDualEncoderModel
except InputError as error:
    assert "pip uninstall torchvision" in str(error)
"""


def test_a_torchvision_that_does_not_import_is_named(tmp_path) -> None:
    """The doctor names it; the classes of every family import, or one sentence says why not."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator nms does not exist')")
    paths = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_TORCHVISION],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert "operator nms does not exist" in done.stdout


def test_the_cache_is_listed_and_cleared(shapes, loaded_tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DOSAPP_CACHE", str(tmp_path / "cache"))
    write_folder(tmp_path / "data", shapes, {0: "zero", 1: "one"})
    load_dataset(str(tmp_path / "data"), loaded_tiny.preprocess).train.images.read([0])
    [entry] = list_cache()
    assert entry.images == 8  # two thirds of two classes of six
    assert entry.name in dosapp("cache", "list", cwd=tmp_path).stdout
    assert "1 file deleted" in dosapp("cache", "clear", cwd=tmp_path).stdout
    assert list_cache() == []
