"""Images from formulas: outlines as signed distances, textures as waves, then light and noise.

Everything works on a batch. `u` and `v` are `[N, H, W]` coordinates in the frame of the figure,
which fills the unit disc; an outline is negative inside and positive outside.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dosapp.data.preprocess import to_bytes

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
    """Disc."""
    return (u.square() + v.square()).sqrt() - radius


def box(u: Tensor, v: Tensor, width: float = 0.75, height: float = 0.75) -> Tensor:
    """Rectangle; width and height are those of its half."""
    return torch.maximum(u.abs() - width, v.abs() - height)


def polygon(u: Tensor, v: Tensor, sides: int, radius: float = 0.7) -> Tensor:
    """Regular polygon; `radius` is its apothem, one corner points up."""
    sector = 2 * torch.pi / sides
    angle = torch.atan2(u, -v) + torch.pi / sides
    folded = torch.remainder(angle, sector) - sector / 2
    return (u.square() + v.square()).sqrt() * folded.cos() - radius


def star(u: Tensor, v: Tensor) -> Tensor:
    """Star with five points."""
    angle = torch.atan2(u, -v)
    return (u.square() + v.square()).sqrt() - (0.68 + 0.3 * (5 * angle).cos())


def cross(u: Tensor, v: Tensor) -> Tensor:
    """Cross of two bars."""
    return torch.minimum(box(u, v, 0.95, 0.3), box(u, v, 0.3, 0.95))


def ring(u: Tensor, v: Tensor) -> Tensor:
    """Ring."""
    return disc(u, v, 0.7).abs() - 0.22


def crescent(u: Tensor, v: Tensor) -> Tensor:
    """Disc without a second disc at its side."""
    return torch.maximum(disc(u, v, 0.95), -disc(u - 0.5, v, 0.75))


def heart(u: Tensor, v: Tensor) -> Tensor:
    """Two discs above a point."""
    lobes = torch.minimum(disc(u - 0.42, v + 0.32, 0.5), disc(u + 0.42, v + 0.32, 0.5))
    point = torch.maximum(u.abs() + v - 0.9, -v - 0.32)
    return torch.minimum(lobes, point)


def arrow(u: Tensor, v: Tensor) -> Tensor:
    """Arrow that points up."""
    head = torch.maximum(u.abs() - (v + 0.95) * 0.8, v)
    shaft = box(u, v - 0.45, 0.25, 0.5)
    return torch.minimum(head, shaft)


def bar(u: Tensor, v: Tensor) -> Tensor:
    """Horizontal bar."""
    return box(u, v, 0.95, 0.35)


@dataclass(frozen=True)
class Style:
    """How a domain is rendered. Pairs are ranges: one value is drawn from them for each image."""

    noise: tuple[float, float] = (0.0, 0.15)  # standard deviation of Gaussian noise
    contrast: tuple[float, float] = (0.7, 1.0)
    light: tuple[float, float, float] = (1.0, 1.0, 1.0)  # colour of the light, RGB
    size: tuple[float, float] = (0.30, 0.46)  # radius of the figure as a share of the image
    rotation: float = 0.35  # largest angle, radians
    clutter: float = 0.0  # amplitude of random waves over the whole image


class Canvas:
    """A batch of square images on random grey grounds, each with its own frame for the figure."""

    def __init__(self, count: int, size: int, style: Style, generator: torch.Generator) -> None:
        self.style, self.generator, self.count = style, generator, count
        axis = (torch.arange(size) + 0.5) / size * 2 - 1
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        radius = 2 * self.uniform(*style.size)
        margin = (1 - radius).clamp(min=0)
        x = x - self.uniform(-1, 1) * margin
        y = y - self.uniform(-1, 1) * margin
        angle = self.uniform(-style.rotation, style.rotation)
        self.u = (x * angle.cos() - y * angle.sin()) / radius
        self.v = (x * angle.sin() + y * angle.cos()) / radius
        self.sharpness = radius * size / 2  # edges are one pixel soft
        ground = self.uniform(0.25, 0.75).unsqueeze(1) + self.uniform(-0.08, 0.08, 3)
        self.images = ground.expand(count, 3, size, size).clone()

    def uniform(self, low: float, high: float, channels: int = 1) -> Tensor:
        """Draw one number for each image (and channel), shaped to broadcast."""
        shape = (self.count, channels, 1, 1) if channels > 1 else (self.count, 1, 1)
        return low + (high - low) * torch.rand(shape, generator=self.generator)

    def paint(self, outline: Tensor, colour: Tensor, brightness: Tensor | float = 1.0) -> None:
        """Fill the inside of `outline [N, H, W]` with `colour [N, 3]` times a brightness."""
        alpha = (0.5 - outline * self.sharpness).clamp(0, 1).unsqueeze(1)
        if isinstance(brightness, Tensor):
            brightness = brightness.unsqueeze(1)
        self.images = self.images * (1 - alpha) + colour[:, :, None, None] * brightness * alpha

    def finish(self) -> Tensor:
        """Apply clutter, contrast, light and noise; `uint8 [N, 3, H, W]`."""
        style, images = self.style, self.images
        if style.clutter:
            waves = torch.zeros_like(self.u)
            for _ in range(3):
                a, b = self.uniform(-7, 7), self.uniform(-7, 7)
                phase = self.uniform(0, 2 * torch.pi)
                waves += (a * self.u + b * self.v + phase).sin()
            images = images + style.clutter / 3 * waves.unsqueeze(1)
        contrast = self.uniform(*style.contrast).unsqueeze(1)
        images = 0.5 + (images - 0.5) * contrast
        images = images * torch.tensor(style.light)[:, None, None]
        noise = self.uniform(*style.noise).unsqueeze(1)
        images = images + noise * torch.randn(images.shape, generator=self.generator)
        return to_bytes(images.clamp(0, 1))


def select_outlines(
    outlines: Mapping[str, Outline], names: list[str], u: Tensor, v: Tensor
) -> Tensor:
    """The outline of each image by name, `[N, H, W]`."""
    result = torch.empty_like(u)
    for name in sorted(set(names)):
        rows = torch.tensor([row for row, other in enumerate(names) if other == name])
        result[rows] = outlines[name](u[rows], v[rows])
    return result
