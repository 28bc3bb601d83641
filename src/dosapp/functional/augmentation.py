"""Random changes that keep what a picture shows: colours, place, sharpness. RMT and CoTTA use them.

Pictures are `[B, 3, H, W]` in [0, 1] before and after, each with its own random numbers. The
ranges are CoTTA's, the order of the colour changes is fixed. Hue turns in the plane of equal
brightness (YIQ); what an affine map brings in from outside repeats the edge.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, pad

TO_YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])


def augment(pixels: Tensor, generator: torch.Generator) -> Tensor:
    count = len(pixels)

    def between(low: float, high: float) -> Tensor:
        drawn = torch.rand(count, generator=generator)
        return (low + (high - low) * drawn).view(-1, 1, 1, 1).to(pixels.device)

    changed = pixels.clamp(0, 1) * between(0.6, 1.4)  # brightness
    grey = changed.mean(dim=(1, 2, 3), keepdim=True)
    changed = grey + (changed - grey) * between(0.7, 1.3)  # contrast
    changed = _coloured(changed, between(0.5, 1.5), between(-0.06, 0.06)).clamp(0, 1)
    changed = changed.clamp(min=1e-6) ** between(0.7, 1.3)  # gamma
    changed = _moved(
        changed,
        angle=between(-15, 15) * math.pi / 180,
        across=between(-1 / 8, 1 / 8),  # a sixteenth of the width, in a grid from -1 to 1
        down=between(-1 / 8, 1 / 8),
        size=between(0.9, 1.1),
        mirror=torch.where(between(0, 1) < 0.5, -1.0, 1.0),
    )
    changed = _blurred(changed, between(0.001, 0.5))
    noise = torch.randn(changed.shape, generator=generator).to(pixels.device)
    return (changed + 0.005 * noise).clamp(0, 1)


def _coloured(pixels: Tensor, saturation: Tensor, turn: Tensor) -> Tensor:
    """Scale and turn the two colour axes; `turn` is a share of the circle."""
    yiq = torch.einsum("ij,bjhw->bihw", TO_YIQ.to(pixels.device), pixels)
    angle = (2 * math.pi * turn).view(-1, 1, 1)
    i, q, strength = yiq[:, 1], yiq[:, 2], saturation.view(-1, 1, 1)
    turned = torch.stack(
        [
            yiq[:, 0],
            strength * (i * angle.cos() - q * angle.sin()),
            strength * (i * angle.sin() + q * angle.cos()),
        ],
        dim=1,
    )
    return torch.einsum("ij,bjhw->bihw", torch.linalg.inv(TO_YIQ).to(pixels.device), turned)


def _moved(
    pixels: Tensor, angle: Tensor, across: Tensor, down: Tensor, size: Tensor, mirror: Tensor
) -> Tensor:
    cos, sin = angle.cos() / size, angle.sin() / size
    rows = [
        torch.cat([cos * mirror, -sin, across], dim=3),
        torch.cat([sin * mirror, cos, down], dim=3),
    ]
    matrix = torch.cat(rows, dim=2).squeeze(1)  # [B, 2, 3]
    grid = affine_grid(matrix, list(pixels.shape), align_corners=False)
    return grid_sample(pixels, grid, padding_mode="border", align_corners=False)


def _blurred(pixels: Tensor, sigma: Tensor) -> Tensor:
    """A Gaussian of five pixels, along each axis in turn."""
    place = torch.arange(-2.0, 3.0, device=pixels.device)
    kernel = torch.exp(-(place**2) / (2 * sigma.view(-1, 1) ** 2))  # [B, 5]
    kernel = (kernel / kernel.sum(dim=1, keepdim=True)).view(-1, 5, 1, 1, 1)
    for dim, edge in ((2, (0, 0, 2, 2)), (3, (2, 2, 0, 0))):
        wide, size = pad(pixels, edge, mode="replicate"), pixels.shape[dim]
        pixels = torch.stack([kernel[:, n] * wide.narrow(dim, n, size) for n in range(5)]).sum(0)
    return pixels
