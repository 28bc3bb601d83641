"""Image files for tests of data loading, and the preprocessing that they get."""

from pathlib import Path

from PIL import Image

from dosapp.data.preprocess import Preprocess
from dosapp.data.synthetic.shapes import SHAPES_HARD

PREPROCESS = Preprocess(32, {"shortest_edge": 32}, 3)  # of the tiny backbone
BROKEN = b"\x89PNG"


def write_image(path: Path, red: int = 0) -> None:
    """Write an image of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (9, 8), (red % 256, 3, 5)).save(path)


def write_images(folder: Path, count: int, suffix: str = "png") -> Path:
    """Write images named by their number, each with its own colour."""
    for n in range(count):
        write_image(folder / f"{n}.{suffix}", 20 * n)
    return folder


def write_class_folders(root: Path, names: list[str]) -> Path:
    """Write a training image and two test images of each class; red is the class index."""
    for n, name in enumerate(names):
        write_image(root / "train" / name / "0.png", n)
        for k in range(2):
            write_image(root / "test" / name / f"{k}.png", n)
    return root


# Class names that mean nothing to a backbone, as names of products often do.
NONSENSE = ["big_dax", "blicket", "fep", "gazzer", "modi", "toma", "wug", "ziv"]


def write_shape_folders(root: Path, train: int = 10, test: int = 12) -> Path:
    """Write eight classes of generated images behind clutter, which a backbone has to learn.

    They are far apart in the list of shapes, so that they differ in shape, colour and fill. Without
    test images the class folders are not in train and test.
    """
    dataset = SHAPES_HARD.draw_dataset(32, train, max(test, 2))
    parts = {"train": dataset.train, "test": dataset.test} if test else {".": dataset.train}
    for part, split in parts.items():
        for label, name in zip(range(0, 96, 12), NONSENSE, strict=True):
            folder = root / part / name
            folder.mkdir(parents=True)
            for n, pixels in enumerate(split.images.read((split.labels == label).nonzero()[0])):
                Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / f"{n}.png")
    return root
