"""ImageArray from formulas: outlines as signed distances, textures as waves, then light and noise.

Everything works on a batch: `u` and `v` are `[N, H, W]` coordinates in the frame of the figure
(the figure fills the unit disc), and an outline is negative inside, positive outside.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Outline = Callable[[Tensor, Tensor], Tensor]

RGB: Mapping[str, tuple[float, float, float]] = {
    "red": (0.85, 0.10, 0.12),
    "orange": (0.95, 0.50, 0.08),
    "yellow": (0.93, 0.85, 0.12),
    "green": (0.13, 0.62, 0.20),
    "cyan": (0.15, 0.78, 0.80),
    "blue": (0.13, 0.25, 0.85),
    "purple": (0.50, 0.15, 0.70),
    "pink": (0.96, 0.55, 0.75),
    "brown": (0.45, 0.26, 0.10),
    "white": (0.95, 0.95, 0.95),
    "black": (0.06, 0.06, 0.06),
}


def disc(u: Tensor, v: Tensor, radius: float = 0.9) -> Tensor:
    return (u.square() + v.square()).sqrt() - radius


def box(u: Tensor, v: Tensor, width: float = 0.75, height: float = 0.75) -> Tensor:
    return torch.maximum(u.abs() - width, v.abs() - height)


def polygon(u: Tensor, v: Tensor, sides: int, radius: float = 0.7) -> Tensor:
    """Regular polygon by its apothem, one corner pointing up."""
    sector = 2 * torch.pi / sides
    angle = torch.atan2(u, -v) + torch.pi / sides
    folded = torch.remainder(angle, sector) - sector / 2
    return (u.square() + v.square()).sqrt() * folded.cos() - radius


def star(u: Tensor, v: Tensor) -> Tensor:
    angle = torch.atan2(u, -v)
    return (u.square() + v.square()).sqrt() - (0.68 + 0.3 * (5 * angle).cos())


def cross(u: Tensor, v: Tensor) -> Tensor:
    return torch.minimum(box(u, v, 0.95, 0.3), box(u, v, 0.3, 0.95))


def ring(u: Tensor, v: Tensor) -> Tensor:
    return disc(u, v, 0.7).abs() - 0.22


def crescent(u: Tensor, v: Tensor) -> Tensor:
    return torch.maximum(disc(u, v, 0.95), -disc(u - 0.5, v, 0.75))


def heart(u: Tensor, v: Tensor) -> Tensor:
    lobes = torch.minimum(disc(u - 0.42, v + 0.32, 0.5), disc(u + 0.42, v + 0.32, 0.5))
    point = torch.maximum(u.abs() + v - 0.9, -v - 0.32)
    return torch.minimum(lobes, point)


def arrow(u: Tensor, v: Tensor) -> Tensor:
    """Points up."""
    head = torch.maximum(u.abs() - (v + 0.95) * 0.8, v)
    shaft = box(u, v - 0.45, 0.25, 0.5)
    return torch.minimum(head, shaft)


def bar(u: Tensor, v: Tensor) -> Tensor:
    return box(u, v, 0.95, 0.35)


@dataclass(frozen=True)
class Style:
    """How a domain looks: its light, its blur of detail and its dirt."""

    noise: tuple[float, float] = (0.0, 0.15)  # Gaussian, drawn per picture in this range
    contrast: tuple[float, float] = (0.7, 1.0)
    light: tuple[float, float, float] = (1.0, 1.0, 1.0)  # colour of the lamp
    size: tuple[float, float] = (0.30, 0.46)  # radius as a share of the picture
    turn: float = 0.35  # largest rotation, radians
    clutter: float = 0.0  # strength of a random wave over the whole picture


class Canvas:
    """A batch of `count` square pictures on random dull grounds, each with its own placed frame."""

    def __init__(self, count: int, pixels: int, style: Style, generator: torch.Generator) -> None:
        self.style, self.generator, self.count = style, generator, count
        axis = (torch.arange(pixels) + 0.5) / pixels * 2 - 1
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        radius = 2 * self.uniform(*style.size)
        room = (1 - radius).clamp(min=0)
        x = x - self.uniform(-1, 1) * room
        y = y - self.uniform(-1, 1) * room
        turn = self.uniform(-style.turn, style.turn)
        self.u = (x * turn.cos() - y * turn.sin()) / radius
        self.v = (x * turn.sin() + y * turn.cos()) / radius
        self.sharpness = radius * pixels / 2  # one soft pixel at each edge
        ground = self.uniform(0.25, 0.75).unsqueeze(1) + self.uniform(-0.08, 0.08, 3)
        self.picture = ground.expand(count, 3, pixels, pixels).clone()

    def uniform(self, low: float, high: float, channels: int = 1) -> Tensor:
        """One number for each picture (and channel), shaped to broadcast."""
        shape = (self.count, channels, 1, 1) if channels > 1 else (self.count, 1, 1)
        return low + (high - low) * torch.rand(shape, generator=self.generator)

    def paint(self, outline: Tensor, colour: Tensor, tone: Tensor | float = 1.0) -> None:
        """Fill the inside of `outline` with `colour [N, 3]`, darkened by `tone`."""
        cover = (0.5 - outline * self.sharpness).clamp(0, 1).unsqueeze(1)
        paint = colour[:, :, None, None] * (tone.unsqueeze(1) if isinstance(tone, Tensor) else tone)
        self.picture = self.picture * (1 - cover) + paint * cover

    def finish(self) -> Tensor:
        """Apply light, contrast, clutter and noise; `uint8 [N, 3, H, W]`."""
        style, picture = self.style, self.picture
        if style.clutter:
            wave = torch.zeros_like(self.u)
            for _ in range(3):
                a, b, c = (
                    self.uniform(-7, 7),
                    self.uniform(-7, 7),
                    self.uniform(0, 2 * torch.pi),
                )
                wave += (a * self.u + b * self.v + c).sin()
            picture = picture + style.clutter / 3 * wave.unsqueeze(1)
        contrast = self.uniform(*style.contrast).unsqueeze(1)
        picture = 0.5 + (picture - 0.5) * contrast
        picture = picture * torch.tensor(style.light)[:, None, None]
        level = self.uniform(*style.noise).unsqueeze(1)
        picture = picture + level * torch.randn(picture.shape, generator=self.generator)
        return (picture.clamp(0, 1) * 255).round().to(torch.uint8)


def select_outlines(
    outlines: Mapping[str, Outline], which: list[str], u: Tensor, v: Tensor
) -> Tensor:
    """The outline each picture asks for by name, `[N, H, W]`."""
    result = torch.empty_like(u)
    for name in sorted(set(which)):
        rows = torch.tensor([i for i, w in enumerate(which) if w == name])
        result[rows] = outlines[name](u[rows], v[rows])
    return result
