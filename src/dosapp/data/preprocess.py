"""How an image becomes the input of a backbone: resize, centre crop, RGB, bytes.

Loading data needs this value, not a loaded model. Normalisation with mean and standard deviation
happens inside the backbone, so that noise, augmentation and replay act on plain pixels.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dosapp.data.decoding import band_names, convert, is_plain, to_eight_bits

LARGE = 1_000_000  # pixels


@dataclass(frozen=True)
class Preprocess:
    """Resize and crop as the backbone was trained.

    Example:
        >>> from PIL import Image
        >>> preprocess = Preprocess(32, {"shortest_edge": 32}, 3)
        >>> preprocess(Image.new("RGB", (64, 48))).shape
        torch.Size([3, 32, 32])
    """

    image_size: int  # of the square crop
    size: Mapping[str, int]  # of the resize: shortest_edge, or width and height
    resample: int  # Pillow's number of the resampling filter

    def __call__(self, image: Image.Image) -> Tensor:
        """Prepare one image: `uint8 [3, image_size, image_size]`."""
        if is_plain(image) or image.width * image.height <= LARGE:
            return self._prepare(to_eight_bits(image))
        # Band by band: a second copy of a large image would take as much memory as the first.
        bands = [self._prepare(convert(image, band))[:1] for band in band_names(image)]
        return torch.cat(bands * (3 // len(bands)))

    def _prepare(self, image: Image.Image) -> Tensor:
        if "shortest_edge" in self.size:
            shortest = self.size["shortest_edge"]
            ratio = shortest / min(image.size)
            # transformers truncates the longer side; exact arithmetic keeps the shorter one.
            width, height = (
                shortest if side == min(image.size) else int(side * ratio) for side in image.size
            )
        else:
            width, height = self.size["width"], self.size["height"]
        image = image.resize((width, height), Image.Resampling(self.resample))
        crop = self.image_size
        left, top = (width - crop) // 2, (height - crop) // 2
        image = image.crop((left, top, left + crop, top + crop)).convert("RGB")
        data = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return data.view(crop, crop, 3).permute(2, 0, 1).contiguous()

    @property
    def key(self) -> str:
        """A string that is equal for equal preprocessing; names files of the image cache."""
        used: dict[str, Any] = {"resample": self.resample, "size": dict(self.size)}
        return json.dumps([self.image_size, used], sort_keys=True)


def to_float(pixels: Tensor) -> Tensor:
    """Bytes 0 … 255 → floats in [0, 1]; floats are returned as they are."""
    return pixels if pixels.is_floating_point() else pixels.float() / 255


def to_bytes(pixels: Tensor) -> Tensor:
    """Floats in [0, 1] → bytes 0 … 255; bytes are returned as they are."""
    return (pixels * 255).round().to(torch.uint8) if pixels.is_floating_point() else pixels
