"""Large images that are turned or transparent: the same pixels, without a copy of the whole."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from dosapp.data import decoding, preprocess
from dosapp.data.preprocess import Preprocess

SIZES = ({"shortest_edge": 24}, {"width": 24, "height": 24})
KINDS = [("RGB", "PNG"), ("RGBA", "PNG"), ("LA", "PNG"), ("L", "PNG"), ("P", "PNG"),
         ("I;16", "PNG"), ("1", "PNG"), ("CMYK", "JPEG"), ("RGB", "JPEG"),
         ("RGBA", "TIFF")]  # fmt: skip


def encode(mode: str, kind: str, orientation: int) -> bytes:
    """Noise, so that every pixel counts."""
    noise = np.random.default_rng(0).integers(0, 256, (47, 61, 4), dtype=np.uint8)
    if mode == "I;16":
        image = Image.fromarray(noise[..., :2].copy().view("<u2")[..., 0])
    else:
        image = Image.fromarray(noise).convert(mode) if mode != "RGBA" else Image.fromarray(noise)
    exif = Image.Exif()
    exif[decoding.ORIENTATION] = orientation
    with io.BytesIO() as buffer:
        image.save(buffer, kind, exif=exif)
        return buffer.getvalue()


def whole(data: bytes) -> Image.Image:
    """The image as it was converted before: turned first, then as a whole."""
    image = Image.open(io.BytesIO(data))
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        values = (np.asarray(image) / 257).round().clip(0, 255).astype(np.uint8)
        return Image.fromarray(values)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image if image.mode == "L" else image.convert("RGB")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("mode", "kind"), KINDS)
def test_pixels_are_those_of_the_whole_image(mode, kind, orientation, size, monkeypatch) -> None:
    monkeypatch.setattr(decoding, "STRIP_PIXELS", 500)
    prepare, data = Preprocess(24, size, 3), encode(mode, kind, orientation)
    expected = prepare(whole(data))
    assert np.array_equal(np.asarray(decoding.to_rgb(Image.open(io.BytesIO(data)))),
                          np.asarray(whole(data).convert("RGB")))  # fmt: skip
    for large in (0, 1_000_000):
        monkeypatch.setattr(preprocess, "LARGE", large)
        assert torch.equal(prepare(Image.open(io.BytesIO(data))), expected)


@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize(("mode", "kind"), [("RGBA", "PNG"), ("RGB", "JPEG"), ("CMYK", "JPEG")])
def test_no_copy_of_a_large_image_has_all_bands(mode, kind, orientation, monkeypatch) -> None:
    monkeypatch.setattr(decoding, "STRIP_PIXELS", 500)
    monkeypatch.setattr(preprocess, "LARGE", 0)
    data, new, transpose = encode(mode, kind, orientation), Image.new, Image.Image.transpose
    created, turned = [], []

    def record_new(mode, size, *args):
        created.append((mode, size[0] * size[1]))
        return new(mode, size, *args)

    def record_turn(image, turn):
        turned.append(image.width * image.height)
        return transpose(image, turn)

    with Image.open(io.BytesIO(data)) as image:
        image.load()
        monkeypatch.setattr(Image, "new", record_new)
        monkeypatch.setattr(Image.Image, "transpose", record_turn)
        Preprocess(24, SIZES[0], 3)(image)
    assert {mode for mode, pixels in created if pixels > 500} <= {"L"}
    assert max(turned, default=0) <= 500
