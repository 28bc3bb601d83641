"""Decoded pixels against known ones: orientation, bit depth, transparency, in every way in."""

import io
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image

from dosapp.data.decoding import decode_image, to_rgb
from dosapp.data.inputs import stack_images
from dosapp.data.preprocess import Preprocess
from dosapp.service.settings import ServiceSettings
from dosapp.service.uploads import UploadDecoder

PREPROCESS = Preprocess(8, {"shortest_edge": 8}, resample=0)
CORNERS = {(0, 0): (255, 0, 0), (7, 0): (0, 255, 0), (0, 7): (0, 0, 255), (7, 7): (255, 255, 0)}
ORIENTATION = 274  # the tag of EXIF


def four_corners() -> Image.Image:
    image = Image.new("RGB", (8, 8), (90, 90, 90))
    for at, colour in CORNERS.items():
        image.putpixel(at, colour)
    return image


def stored_rotated(orientation: int) -> bytes:
    """The image as a camera writes it: turned, with a tag that says how."""
    turn = {  # what undoes each orientation's transposition
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    image = four_corners().transpose(turn[orientation])
    exif, buffer = image.getexif(), io.BytesIO()
    exif[ORIENTATION] = orientation
    image.save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


def encode(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def decode_all(data: bytes) -> list[torch.Tensor]:
    """The pixels as the service, the command line and Python see them."""
    upload = UploadDecoder(PREPROCESS, ServiceSettings()).decode_image(data)
    file = PREPROCESS(decode_image(lambda: data, "x.png"))
    return [upload, file, stack_images([Image.open(io.BytesIO(data))], PREPROCESS)[0]]


@pytest.mark.parametrize("orientation", range(2, 9))
def test_a_rotated_photo_is_upright_everywhere(orientation) -> None:
    for pixels in decode_all(stored_rotated(orientation)):
        for (x, y), colour in CORNERS.items():
            assert tuple(pixels[:, y, x].tolist()) == colour


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    expected = (values / 257).round()
    for pixels in decode_all(encode(Image.fromarray(values))):
        assert np.array_equal(pixels[0].numpy(), expected)
        assert torch.equal(pixels[0], pixels[2])


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white_and_half_transparent_ones_half(mode) -> None:
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 255))
    image.putpixel((0, 0), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 128))
    image = image.convert(mode) if mode != "P" else image.quantize(4)
    for pixels in decode_all(encode(image)):
        assert pixels[:, 0, 0].tolist() == [255, 255, 255]
        assert pixels[:, 0, 1].tolist() == pytest.approx([127, 127, 127], abs=1)
        assert pixels[:, 7, 7].tolist() == [0, 0, 0]


@pytest.mark.parametrize("tag", [b"garbage", b"Exif\0\0II*\0"])
def test_a_damaged_tag_does_not_hide_the_pixels(tag) -> None:
    buffer = io.BytesIO()
    four_corners().save(buffer, "PNG", exif=tag)
    for pixels in decode_all(buffer.getvalue()):
        assert tuple(pixels[:, 0, 0].tolist()) == CORNERS[0, 0]


def test_bytes_in_a_wide_mode_stay_bytes() -> None:
    image = Image.fromarray(np.full((8, 8), 200, dtype=np.int32))
    assert to_rgb(image).getpixel((0, 0)) == (200, 200, 200)


def test_a_plain_image_is_not_copied() -> None:
    image = four_corners()
    assert to_rgb(image) is image
    assert to_rgb(image.convert("L")).mode == "RGB"


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_sixteen_bits_are_converted_in_little_memory(dtype) -> None:
    """Whole images of floats would take 24 bytes per pixel; a strip takes a few megabytes."""
    values = np.random.default_rng(0).integers(0, 65536, (1500, 2000)).astype(dtype)
    image = Image.fromarray(values)
    tracemalloc.start()
    try:
        converted = to_rgb(image)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5 * values.size
    assert np.array_equal(np.asarray(converted)[..., 1], (values / 257).round())


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "F", "I", "YCbCr"])
def test_strips_are_the_whole_image(mode, monkeypatch) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (31, 17, 4), dtype=np.uint8)
    image = Image.fromarray(noise).convert("RGB" if mode not in ("LA", "RGBA") else mode)
    image = image.convert(mode)
    whole = to_rgb(image)
    monkeypatch.setattr("dosapp.data.decoding.STRIP_PIXELS", 50)
    assert to_rgb(image).tobytes() == whole.tobytes()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("resample", range(6))
@pytest.mark.parametrize("size", [{"shortest_edge": 20}, {"width": 40, "height": 8}])
def test_grey_images_are_resized_as_rgb(dtype, resample, size) -> None:
    values = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (31, 17)).astype(dtype)
    image, preprocess = Image.fromarray(values), Preprocess(20, size, resample)
    assert torch.equal(preprocess(image), preprocess(to_rgb(image)))
