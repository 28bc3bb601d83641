"""`signs`: road-sign-like plates, the second generated domain, for a domain shift after shapes."""

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
    bar,
    box,
    cross,
    disc,
    polygon,
    select_outlines,
)

BORDERS = ["red", "blue", "yellow", "green", "black"]
PLATES: dict[str, Outline] = {
    "round": partial(disc, radius=0.95),
    "square": partial(box, width=0.85, height=0.85),
    "diamond": partial(polygon, sides=4, radius=0.72),
    "octagonal": partial(polygon, sides=8, radius=0.9),
    "triangular": partial(polygon, sides=3, radius=0.55),
}


def dots(u: Tensor, v: Tensor) -> Tensor:
    """Two discs side by side."""
    return torch.minimum(disc(u - 0.55, v, 0.4), disc(u + 0.55, v, 0.4))


PICTOGRAMS: dict[str, Outline] = {
    "up arrow": arrow,
    "left arrow": lambda u, v: arrow(-v, u),
    "right arrow": lambda u, v: arrow(v, -u),
    "bar": bar,
    "cross": cross,
    "dot": partial(disc, radius=0.7),
    "pair of dots": dots,
    "chevron": lambda u, v: torch.maximum((v + u.abs() - 0.2).abs() - 0.3, box(u, v, 0.9, 0.9)),
}


def draw(names: list[str], size: int, style: Style, generator: torch.Generator) -> Tensor:
    """Draw one image for each class name, `uint8 [N, 3, size, size]`."""
    borders, plates, pictograms = [], [], []
    for name in names:
        border, plate, pictogram = name.split(maxsplit=2)
        borders.append(border)
        plates.append(plate)
        pictograms.append(pictogram.removeprefix("sign with a "))
    canvas = Canvas(len(names), size, style, generator)
    outline = select_outlines(PLATES, plates, canvas.u, canvas.v)
    canvas.paint(outline, torch.tensor([RGB[border] for border in borders]))
    canvas.paint(outline + 0.2, torch.tensor(RGB["white"]).expand(len(names), 3))
    inside = select_outlines(PICTOGRAMS, pictograms, canvas.u * 2.1, canvas.v * 2.1 - 0.1)
    canvas.paint(inside.clamp(min=-1) / 2.1, torch.tensor(RGB["black"]).expand(len(names), 3))
    return canvas.finish()


SIGNS = Domain(
    name="signs",
    description="road-sign-like plates with borders and pictograms: a domain shift after shapes",
    compositions=[f"{b} {p} sign with a {g}" for b in BORDERS for p in PLATES for g in PICTOGRAMS],
    draw=draw,
    pretraining=80,
    benchmark=100,
    control=20,
    pretraining_style=Style(size=(0.36, 0.48), rotation=0.12),
    benchmark_style=Style(
        noise=(0.05, 0.15),
        contrast=(0.5, 0.9),
        light=(0.75, 0.88, 1.0),
        size=(0.36, 0.48),
        rotation=0.12,
        clutter=0.15,
    ),
)
