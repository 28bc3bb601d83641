"""Run many classes in many sessions on the embedded backbone, and print memory after each.

    python tools/many_classes.py FOLDER --classes 1000 --sessions 50

The images are drawn into FOLDER/images, as class folders. Classes are the compositions of `shapes`;
beyond 600 they come again, in a frame.
"""

import argparse
import os
import time
from pathlib import Path

from PIL import Image

from dosapp import RunCallback, RunSettings, run
from dosapp.data.synthetic.shapes import SHAPES
from dosapp.runtime.process_memory import peak_memory, resident_memory
from dosapp.runtime.rng import torch_rng

IMAGE_SIZE = 32
IMAGES = {"train": 8, "test": 4}  # per class; half of the test images are streamed


class PrintMemory(RunCallback):
    """Prints one line per session."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def on_evaluation(self, session: int, accuracies: list[float]) -> None:
        """A session is over."""
        seconds, average = time.monotonic() - self.start, sum(accuracies) / len(accuracies)
        print(
            f"session {session + 1:3}: {resident_memory(os.getpid()):5.0f} MB (peak "
            f"{peak_memory():5.0f} MB), {seconds:6.0f} s, accuracy {average:.1f} %",
            flush=True,
        )


def draw_folder(folder: Path, classes: int) -> None:
    """Draw the images of all classes as PNG files."""
    names = [*SHAPES.compositions, *(f"framed {name}" for name in SHAPES.compositions)][:classes]
    for split, count in IMAGES.items():
        for name in names:
            drawn = [name.removeprefix("framed ")] * count
            rng = torch_rng("many classes", split, name)
            pixels = SHAPES.draw(drawn, IMAGE_SIZE, SHAPES.benchmark_style, rng)
            if name.startswith("framed"):
                pixels[:, :, [0, 1, -2, -1], :] = 255
                pixels[:, :, :, [0, 1, -2, -1]] = 255
            path = folder / split / name
            path.mkdir(parents=True)
            for n, image in enumerate(pixels):
                Image.fromarray(image.permute(1, 2, 0).numpy()).save(path / f"{n}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--sessions", type=int, default=50)
    given = parser.parse_args()
    images = given.folder / "images"
    if not images.exists():
        draw_folder(images, given.classes)
    settings = RunSettings(data=str(images), tasks=given.sessions)
    result = run(settings, given.folder / "run", resume=True, callback=PrintMemory())
    print(f"accuracy {result.metrics['accuracy']:.1f} %, peak {result.peak_memory:.0f} MB")
