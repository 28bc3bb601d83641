"""Images that callers give, as tensors at the backbone's size."""

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from dosapp.data.preprocess import Preprocess, to_float
from dosapp.errors import InputError

Images = Tensor | Sequence[Image.Image]


def stack_images(images: Images, preprocess: Preprocess) -> Tensor:
    """Preprocess Pillow images into `uint8 [n, 3, H, W]`; tensors are returned as they are."""
    if isinstance(images, Tensor):
        return images
    if isinstance(images, str) or not isinstance(images, Sequence):
        kind = type(images).__name__
        raise InputError(f"images are a {kind}; give a list of Pillow images, or a tensor")
    other = next((image for image in images if not isinstance(image, Image.Image)), None)
    if other is not None:
        kind = type(other).__name__
        raise InputError(f"a list of images holds a {kind}; give Pillow images, or one tensor")
    size = preprocess.image_size
    empty = torch.zeros(0, 3, size, size, dtype=torch.uint8)
    return torch.stack([preprocess(image) for image in images]) if images else empty


def read_pixels(images: Images, preprocess: Preprocess) -> Tensor:
    """Convert images to `float [B, 3, H, W]` in [0, 1] and check them."""
    size = preprocess.image_size
    if not isinstance(images, Tensor):
        return to_float(stack_images(images, preprocess))
    if images.ndim != 4 or images.shape[1:] != (3, size, size):
        raise InputError(f"images have shape {list(images.shape)}; give [B, 3, {size}, {size}]")
    pixels = to_float(images)
    if len(pixels) and not (pixels.min() >= 0 and pixels.max() <= 1):  # NaN fails both
        raise InputError("images have values outside 0 to 1; give floats in [0, 1] or uint8")
    return pixels
