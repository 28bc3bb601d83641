"""Rotated, 16-bit and transparent images are the same known pixels wherever they come in."""

import io
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dosapp.data.folder import load_folder
from dosapp.learner.learner import Learner
from dosapp.service.service import LearningService, open_service
from dosapp.service.settings import ServiceSettings
from support.cli import dosapp
from support.services import serve_at_port

pytest.importorskip("fastapi")
from dosapp.service.client import Client

ORIENTATION, ROTATED_90 = 274, 6  # the tag of EXIF; the camera was turned to the left
SIZE = 32


def encode(image: Image.Image, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


def make_images() -> dict[str, tuple[bytes, np.ndarray]]:
    """Name → file, and the RGB bytes `[H, W, 3]` that a viewer shows, by arithmetic alone."""
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    turned = Image.fromarray(np.rot90(colours).copy())  # as the sensor saw it
    exif = turned.getexif()
    exif[ORIENTATION] = ROTATED_90
    grey = rng.integers(0, 65536, (SIZE, SIZE), dtype=np.uint16)
    alpha = rng.integers(0, 2, (SIZE, SIZE, 1), dtype=np.uint8) * 255
    layer = Image.fromarray(np.concatenate([colours, alpha], axis=2))
    return {
        "rotated": (encode(turned, exif=exif), colours),
        "sixteen bits": (
            encode(Image.fromarray(grey)),
            np.repeat((grey / 257).round().astype(np.uint8)[..., None], 3, axis=2),
        ),
        "transparent": (encode(layer), np.where(alpha == 255, colours, 255).astype(np.uint8)),
    }


IMAGES = make_images()
KNOWN = {name: Image.fromarray(pixels) for name, (_, pixels) in IMAGES.items()}


def write_classes(folder: Path, known: bool = False) -> Path:
    """One class of each kind, with its image three times; or with the known pixels as plain RGB."""
    for name, (data, _) in IMAGES.items():
        (folder / name).mkdir(parents=True)
        for n in range(3):
            (folder / name / f"{n}.png").write_bytes(encode(KNOWN[name]) if known else data)
    return folder


def test_every_way_to_predict_sees_the_known_pixels(folder, tmp_path) -> None:
    learner = Learner.load(folder)
    paths = []
    for name, (data, _) in IMAGES.items():
        paths.append(tmp_path / f"{name}.png")
        paths[-1].write_bytes(data)
    expected = [p.score for p in learner.predict(list(KNOWN.values()))]
    python = [p.score for p in learner.predict([Image.open(path) for path in paths])]
    assert python == expected
    with served(folder) as service, serve_at_port(service) as url, Client(url) as client:
        answers = client.predict(paths, learn=False)["predictions"]
        assert [a["score"] for a in answers] == pytest.approx(expected, abs=1e-5)
        printed = dosapp("client", "predict", *paths, "--url", url, "--no-learn").stdout
    for line, score, prediction in zip(printed.splitlines(), expected, answers, strict=False):
        assert f"{prediction['label']} {score:.0%}" in line


def served(folder: Path):
    settings = {"threads": 1, "batch_wait": 0.0, "adapt": False, "token": False,
                "session_drop": 100}  # fmt: skip
    return open_service(folder, ServiceSettings.parse(settings))


def test_python_trains_the_known_pixels(folder, tmp_path) -> None:
    digests = []
    for known in (True, False):
        classes = write_classes(tmp_path / str(known), known)
        learner = Learner.load(folder)
        learner.learn({n: [Image.open(p) for p in (classes / n).iterdir()] for n in sorted(KNOWN)})
        digests.append(learner.digest())
    assert digests[0] == digests[1]


def test_the_service_trains_the_known_pixels(folder, tmp_path) -> None:
    """The same weights to the last bit, from a folder and from a zip, by the command line."""
    known, odd = (write_classes(tmp_path / name, name == "known") for name in ("known", "odd"))
    archive = tmp_path / "odd.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(odd.rglob("*.png")):
            file.write(path, path.relative_to(odd))
    digests = []
    for session in (known, odd, archive):
        copy = Path(shutil.copytree(folder, tmp_path / f"learner-{session.name}"))
        with served(copy) as service, serve_at_port(service) as url:
            assert isinstance(service, LearningService)
            assert "version 2" in dosapp("client", "learn", session, "--url", url).stdout
            digests.append(service.writer.learner.digest())
    assert len(set(digests)) == 1


def test_a_folder_of_a_run_has_the_known_pixels(tmp_path, loaded_tiny) -> None:
    dataset = load_folder(write_classes(tmp_path / "classes"))
    for split in (dataset.train, dataset.test):
        for row, label in enumerate(split.labels):
            pixels = loaded_tiny.preprocess(split.images.open(row))
            known = loaded_tiny.preprocess(KNOWN[dataset.classes[label]])
            assert torch.equal(pixels, known)
