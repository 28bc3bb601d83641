"""CoTTA's random augmentation, also used by RMT: colour, affine map, blur and noise.

Images are `[B, 3, H, W]` in [0, 1] before and after, each with its own random numbers. The ranges
are CoTTA's; the order of the colour changes is fixed. Hue is rotated in YIQ space, and pixels from
outside the image repeat its edge.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, pad

TO_YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])


def augment(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Augment each image of a batch with random numbers of its own."""
    count = len(pixels)

    def uniform(low: float, high: float) -> Tensor:
        random = torch.rand(count, generator=generator)
        return (low + (high - low) * random).view(-1, 1, 1, 1).to(pixels.device)

    changed = pixels.clamp(0, 1) * uniform(0.6, 1.4)  # brightness
    grey = changed.mean(dim=(1, 2, 3), keepdim=True)
    changed = grey + (changed - grey) * uniform(0.7, 1.3)  # contrast
    changed = _shift_colours(changed, uniform(0.5, 1.5), uniform(-0.06, 0.06)).clamp(0, 1)
    changed = changed.clamp(min=1e-6) ** uniform(0.7, 1.3)  # gamma
    changed = _transform(
        changed,
        angle=uniform(-15, 15) * math.pi / 180,
        across=uniform(-1 / 8, 1 / 8),  # a sixteenth of the width, in a grid from -1 to 1
        down=uniform(-1 / 8, 1 / 8),
        size=uniform(0.9, 1.1),
        mirror=torch.where(uniform(0, 1) < 0.5, -1.0, 1.0),
    )
    changed = _blur(changed, uniform(0.001, 0.5))
    noise = torch.randn(changed.shape, generator=generator).to(pixels.device)
    return (changed + 0.005 * noise).clamp(0, 1)


def _shift_colours(pixels: Tensor, saturation: Tensor, turn: Tensor) -> Tensor:
    """Scale and rotate the two colour axes; `turn` is a share of the circle."""
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


def _transform(
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


def _blur(pixels: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur with a kernel of five pixels along each axis."""
    offset = torch.arange(-2.0, 3.0, device=pixels.device)
    kernel = torch.exp(-(offset**2) / (2 * sigma.view(-1, 1) ** 2))  # [B, 5]
    kernel = (kernel / kernel.sum(dim=1, keepdim=True)).view(-1, 5, 1, 1, 1)
    for dim, edge in ((2, (0, 0, 2, 2)), (3, (2, 2, 0, 0))):
        padded, size = pad(pixels, edge, mode="replicate"), pixels.shape[dim]
        pixels = torch.stack([kernel[:, n] * padded.narrow(dim, n, size) for n in range(5)]).sum(0)
    return pixels
