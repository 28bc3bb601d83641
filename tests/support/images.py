"""Image files for tests of data loading, and the preprocessing that they get."""

from pathlib import Path

from PIL import Image

from dosapp.data.preprocess import Preprocess

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
