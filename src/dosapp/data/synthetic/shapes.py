"""`shapes`: coloured, textured figures whose class names are compositions of words.

600 compositions: 10 colours × 6 textures × 10 figures. The light of the benchmark differs from that
of the pretraining images. `shapes-hard` has the same classes behind strong clutter: zero-shot
accuracy is low, frozen features are not enough, and training pays.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dosapp.data.synthetic.domain import Domain
from dosapp.data.synthetic.drawing import (
    RGB,
    Canvas,
    Outline,
    Style,
    arrow,
    box,
    crescent,
    cross,
    disc,
    heart,
    polygon,
    ring,
    select_outlines,
    star,
)

COLOURS = [c for c in RGB if c != "black"]
TEXTURES = ["plain", "striped", "dotted", "checkered", "hollow", "shaded"]
FIGURES: dict[str, Outline] = {
    "circle": disc,
    "square": box,
    "triangle": partial(polygon, sides=3, radius=0.5),
    "hexagon": partial(polygon, sides=6, radius=0.8),
    "star": star,
    "cross": cross,
    "ring": ring,
    "crescent": crescent,
    "heart": heart,
    "arrow": arrow,
}


def compute_brightness(texture: str, outline: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Brightness of each point of a figure, 0.25 to 1."""
    wave = 2 * torch.pi * 1.6
    if texture == "plain":
        bright = torch.ones_like(u)
    elif texture == "striped":
        bright = (wave * v).sin() > 0
    elif texture == "dotted":
        bright = (wave * u).cos() * (wave * v).cos() > 0.25
    elif texture == "checkered":
        bright = (wave * 0.6 * u).sin() * (wave * 0.6 * v).sin() > 0
    elif texture == "hollow":
        bright = outline > -0.28
    else:  # shaded, from left to right
        bright = ((u + 1) / 2).clamp(0, 1)
    return 0.25 + 0.75 * bright.float()


def draw(names: list[str], size: int, style: Style, generator: torch.Generator) -> Tensor:
    """Draw one image for each class name, `uint8 [N, 3, size, size]`."""
    colours, textures, figures = zip(*(name.split() for name in names), strict=True)
    canvas = Canvas(len(names), size, style, generator)
    outline = select_outlines(FIGURES, list(figures), canvas.u, canvas.v)
    brightness = torch.empty_like(outline)
    for texture in sorted(set(textures)):
        rows = torch.tensor([row for row, other in enumerate(textures) if other == texture])
        brightness[rows] = compute_brightness(
            texture, outline[rows], canvas.u[rows], canvas.v[rows]
        )
    canvas.paint(outline, torch.tensor([RGB[colour] for colour in colours]), brightness)
    return canvas.finish()


SHAPES = Domain(
    name="shapes",
    description="coloured, textured figures; class names are compositions of words",
    compositions=[f"{c} {t} {f}" for c in COLOURS for t in TEXTURES for f in FIGURES],
    draw=draw,
    pretraining=300,
    benchmark=100,
    control=50,
    pretraining_style=Style(),
    benchmark_style=Style(
        noise=(0.0, 0.15), contrast=(0.6, 1.0), light=(1.0, 0.78, 0.55), clutter=0.12
    ),
)

# The clutter was fixed by the accuracies of zero-shot, nearest class mean, joint training and SPU,
# before any method that adapts to a stream had run on these images (docs/does-it-work.md).
SHAPES_HARD = replace(
    SHAPES,
    name="shapes-hard",
    description="the classes of shapes behind strong clutter, where training pays",
    benchmark_style=replace(SHAPES.benchmark_style, clutter=0.4),
    same_classes_as="shapes",
)
