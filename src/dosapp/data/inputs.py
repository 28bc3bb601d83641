"""Images that callers give: Pillow images, paths, arrays and tensors, at the backbone's size."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dosapp.data.files import FileRef, list_folder_images, open_image
from dosapp.data.preprocess import Preprocess, to_float
from dosapp.errors import InputError

OneImage = Image.Image | Path | str | np.ndarray[Any, Any] | Tensor
Images = OneImage | Sequence[OneImage]  # an array or tensor may hold several


def read_image(image: OneImage, preprocess: Preprocess) -> Tensor:
    """Prepare one image: `uint8 [3, H, W]` at the backbone's size.

    Args:
        image: A Pillow image, a path, or an array or tensor `[H, W]`, `[H, W, C]` or `[C, H, W]`
            of bytes, or of floats in [0, 1].
        preprocess: Resize and crop of the backbone.

    Raises:
        InputError: It is not an image.

    Example:
        >>> preprocess = Preprocess(32, {"shortest_edge": 32}, 3)
        >>> read_image(np.zeros((48, 64, 3), dtype=np.uint8), preprocess).shape
        torch.Size([3, 32, 32])
    """
    if isinstance(image, Image.Image):
        return preprocess(image)
    if isinstance(image, (str, Path)):
        return preprocess(open_image(FileRef(Path(image))))
    if isinstance(image, (np.ndarray, Tensor)):
        return preprocess(image_from_array(image))
    kind = type(image).__name__
    raise InputError(f"an image is a {kind}; give a Pillow image, a path, an array or a tensor")


def image_from_array(values: Any) -> Image.Image:
    """An array or tensor as a Pillow image, or an `InputError` that says what it is instead."""
    array = np.asarray(values)
    shape = list(array.shape)
    if array.ndim == 3 and shape[0] in (1, 3, 4) and shape[2] not in (1, 3, 4):
        array = np.moveaxis(array, 0, 2)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or 0 in shape or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise InputError(f"an image has shape {shape}; give [H, W], [H, W, 3] or [3, H, W]")
    if np.issubdtype(array.dtype, np.floating):
        if not (array.min() >= 0 and array.max() <= 1):  # NaN fails both
            raise InputError(
                "an image has values outside 0 to 1; give bytes or floats in [0, 1], not normalized"
            )
        array = (array * 255).round().astype(np.uint8)
    if array.dtype != np.uint8:
        raise InputError(f"an image has the type {array.dtype}; give uint8, or floats in [0, 1]")
    return Image.fromarray(np.ascontiguousarray(array))


def stack_images(images: Images, preprocess: Preprocess) -> Tensor:
    """Read images into `uint8 [n, 3, H, W]`; a tensor of several is returned as it is."""
    if isinstance(images, Tensor) and images.ndim == 4:
        return images
    size = preprocess.image_size
    read = [read_image(image, preprocess) for image in list_images(images)]
    return torch.stack(read) if read else torch.zeros(0, 3, size, size, dtype=torch.uint8)


def list_images(images: Images) -> Sequence[OneImage]:
    """Images one by one: a folder is the image files in it, a single image is a list of one."""
    if isinstance(images, (str, Path)) and Path(images).is_dir():
        return list_folder_images(Path(images))
    if isinstance(images, (str, Path, Image.Image)):
        return [images]
    if isinstance(images, (np.ndarray, Tensor)):
        return list(images) if images.ndim == 4 else [images]
    if not isinstance(images, Sequence):
        kind = type(images).__name__
        raise InputError(f"images are a {kind}; give Pillow images, paths, an array or a tensor")
    return images


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
