"""Metadata of uploads: what Pillow would parse for seconds never reaches it; pixels stay."""

import contextlib
import io
import struct
import zipfile
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, JpegImagePlugin, PngImagePlugin

from dosapp.data.decoding import to_rgb
from dosapp.data.preprocess import Preprocess
from dosapp.errors import InputError
from dosapp.service.image_headers import MAX_PARTS, CountedFile, strip_metadata
from dosapp.service.settings import ServiceSettings
from dosapp.service.uploads import UploadDecoder

ORIENTATION, ROTATED_90 = 274, 6
SIZE = 32
XMP = b'<x tiff:Orientation="6"/>'
COLOURS = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
KNOWN = Image.fromarray(COLOURS)
TURNED = KNOWN.transpose(Image.Transpose.ROTATE_90)  # as the sensor saw it


@pytest.fixture
def uploads() -> UploadDecoder:
    return UploadDecoder(Preprocess(SIZE, {"shortest_edge": SIZE}, 3), ServiceSettings())


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    with io.BytesIO() as buffer:
        image.copy().save(buffer, kind, **options)  # Pillow keeps options of one format for others
        return buffer.getvalue()


def exif_of(orientation: int) -> Image.Exif:
    """EXIF as cameras write it, with other tags beside the orientation."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    exif[282], exif[305] = 72.0, "camera"
    exif.get_ifd(34665)[33434] = 1 / 30
    return exif


def chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)


def png_with(chunks: bytes) -> bytes:
    data = encode(KNOWN, "PNG")
    return data[:33] + chunks + data[33:]  # after IHDR


def jpeg_with(segments: bytes) -> bytes:
    data = encode(KNOWN, "JPEG", quality=95)
    return data[:2] + segments + data[2:]


def segment(marker: int, data: bytes) -> bytes:
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(data) + 2) + data


def pixels_of(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(to_rgb(image)).copy()).permute(2, 0, 1)


def png_of_texts(count: int) -> bytes:
    """Texts that inflate to 1 MB each, and a profile; the file has 1 kB for each."""
    zeros = zlib.compress(bytes(1 << 20), 9)
    texts = [chunk(b"zTXt", b"key %d\0\0" % n + zeros) for n in range(count)]
    texts += [chunk(b"iTXt", b"key %d\0\1\0\0\0" % n + zeros) for n in range(count)]
    return png_with(b"".join(texts) + chunk(b"iCCP", b"profile\0\0" + zeros))


def tiff(tags: list[tuple[int, int, int, int]], rest: bytes) -> bytes:
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + rest


def tiff_of_strips(strips: int) -> bytes:
    """A grey image of two strips that cover it; more of them cover it again."""
    width, height, start = 8, 9, 8 + 2 + 12 * 9 + 4
    offsets = start + width * height
    tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 1),
            (262, 3, 1, 1), (273, 4, strips, offsets), (277, 3, 1, 1), (278, 4, 1, height - 1),
            (279, 4, strips, offsets)]  # fmt: skip
    return tiff(tags, bytes(width * height) + struct.pack("<I", start) * strips)


class TestHonestFiles:
    @pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP", "JPEG"])
    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_exif_turns_an_image_as_before(self, uploads, kind, orientation) -> None:
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encode(TURNED, kind, exif=exif_of(orientation), **options)
        assert torch.equal(uploads.decode_image(data), pixels_of(Image.open(io.BytesIO(data))))
        if orientation == ROTATED_90 and kind != "JPEG":
            assert torch.equal(uploads.decode_image(data), pixels_of(KNOWN))

    @pytest.mark.parametrize("name", ["xmp", "compressed xmp", "raw", "compressed raw"])
    def test_a_text_turns_a_png_as_before(self, uploads, name) -> None:
        info, is_zip = PngImagePlugin.PngInfo(), name.startswith("compressed")
        if name.endswith("xmp"):
            info.add_itxt("XML:com.adobe.xmp", XMP, zip=is_zip)
        else:  # as ImageMagick writes it
            exif = exif_of(ROTATED_90).tobytes()
            text = f"\nexif\n{len(exif):8}\n{exif.hex()}\n"
            info.add_text("Raw profile type exif", text, zip=is_zip)
        data = encode(TURNED, "PNG", pnginfo=info)
        assert torch.equal(uploads.decode_image(data), pixels_of(KNOWN))

    @pytest.mark.parametrize("kind", ["JPEG", "WEBP", "PNG"])
    def test_xmp_turns_an_image_as_before(self, uploads, kind) -> None:
        data = encode(TURNED, kind, xmp=XMP)
        assert torch.equal(uploads.decode_image(data), pixels_of(Image.open(io.BytesIO(data))))

    def test_big_endian_exif_turns_a_jpeg(self, uploads) -> None:
        exif = struct.pack(">2sHIHHHIHHI", b"MM", 42, 8, 1, ORIENTATION, 3, 1, ROTATED_90, 0, 0)
        data = encode(TURNED, "JPEG", exif=b"Exif\0\0" + exif)
        assert torch.equal(uploads.decode_image(data), pixels_of(Image.open(io.BytesIO(data))))
        assert not torch.equal(
            uploads.decode_image(data), uploads.decode_image(encode(TURNED, "JPEG"))
        )

    @pytest.mark.parametrize(("mode", "kind", "options"), [
        ("RGB", "JPEG", {"keep_rgb": True}), ("CMYK", "JPEG", {}), ("L", "JPEG", {}),
        ("RGB", "JPEG", {"progressive": True, "icc_profile": b"x" * 100_000, "comment": b"x"}),
        ("RGB", "MPO", {"save_all": True, "append_images": [TURNED]}),
        ("RGB", "PNG", {"save_all": True, "append_images": [TURNED]}),
        ("RGB", "PNG", {"icc_profile": b"x" * 100_000}), ("P", "PNG", {"transparency": 3}),
        ("L", "PNG", {"transparency": 7}), ("RGBA", "WEBP", {"icc_profile": b"x" * 1000}),
        ("RGB", "WEBP", {"save_all": True, "append_images": [TURNED]}),
        ("P", "GIF", {"comment": b"x" * 1000}), ("RGB", "TIFF", {"compression": "tiff_lzw"}),
        ("RGB", "TIFF", {"compression": "packbits"}), ("RGB", "TIFF", {"big_tiff": True}),
        ("P", "TIFF", {}), ("CMYK", "TIFF", {}), ("RGB", "BMP", {}), ("RGB", "PPM", {}),
    ])  # fmt: skip
    def test_pixels_are_as_before(self, uploads, mode, kind, options) -> None:
        data = encode(KNOWN.convert(mode), kind, **options)
        assert torch.equal(uploads.decode_image(data), pixels_of(Image.open(io.BytesIO(data))))

    def test_a_png_in_many_chunks_is_read(self, uploads) -> None:
        data = encode(KNOWN, "PNG")
        start = data.index(b"IDAT") - 4
        size = int.from_bytes(data[start : start + 4], "big")
        body, rest = data[start + 8 : start + 8 + size], data[start + 12 + size :]
        small = b"".join(chunk(b"IDAT", body[n : n + 2]) for n in range(0, size, 2))
        assert torch.equal(uploads.decode_image(data[:start] + small + rest), pixels_of(KNOWN))


class TestHostileFiles:
    def test_texts_and_profiles_of_a_png_are_not_inflated(self, uploads, monkeypatch) -> None:
        """Counted by the standard library's objects that Pillow makes to inflate them."""
        inflated, inflate = [], zlib.decompressobj
        monkeypatch.setattr(zlib, "decompressobj", lambda: inflated.append(1) or inflate())
        data = png_of_texts(31)
        Image.open(io.BytesIO(data)).close()
        assert len(inflated) == 63
        inflated.clear()
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("class/a.png", data)
        assert torch.equal(uploads.decode_image(data), pixels_of(KNOWN))
        assert torch.equal(uploads.read_zip(archive.getvalue())["class"][0], pixels_of(KNOWN))
        assert torch.equal(uploads.read_class("a", [("a.png", data)])["a"][0], pixels_of(KNOWN))
        assert not inflated

    def test_segments_of_a_jpeg_are_not_joined(self, uploads, monkeypatch) -> None:
        parsed, parse = [], JpegImagePlugin.APP

        def count(file, marker) -> None:
            parsed.append(marker)
            parse(file, marker)

        names = {marker: (*texts, count if handler is parse else handler)
                 for marker, (*texts, handler) in JpegImagePlugin.MARKER.items()}  # fmt: skip
        monkeypatch.setattr(JpegImagePlugin, "MARKER", names)
        turned = segment(0xE1, exif_of(ROTATED_90).tobytes())
        data = jpeg_with(turned + segment(0xE1, b"Exif\0\0" + bytes(60)) * 900)
        expected = pixels_of(Image.open(io.BytesIO(jpeg_with(turned))))
        parsed.clear()
        assert torch.equal(uploads.decode_image(data), expected)
        assert parsed.count(0xFFE1) == 2  # the orientation, when it is checked and decoded
        assert len(parsed) <= 4

    def test_exif_of_very_many_values_is_not_converted(self, uploads) -> None:
        """Pillow would convert all of them when it turns the image."""
        tags = [(ORIENTATION, 3, 1, ROTATED_90), (283, 5, 500_000, 38)]
        exif = tiff(tags, bytes(8 * 500_000))
        data = encode(TURNED, "PNG", exif=exif)
        assert len(strip_metadata(data)) < len(data) - len(exif) + 100
        assert torch.equal(uploads.decode_image(data), pixels_of(KNOWN))

    @pytest.mark.parametrize("data", [
        png_with(chunk(b"aaAa", b"") * 100_000),
        jpeg_with(segment(0xFE, b"") * 1_001),
        jpeg_with(segment(0xDB, (b"\0" + b"\1" * 64) * 900) * 2),
        jpeg_with(b"\xff\xd0" * 200_000),
        encode(KNOWN.convert("L"), "GIF")[:13] + b"!\xfe\0" * 100_000,
        encode(KNOWN.convert("L"), "GIF")[:13] + b"!\1" + b"\1a" * 100_000,
        b"RIFF\0\0\x20\0WEBPVP8X" + struct.pack("<I", 10) + bytes(10)
        + struct.pack("<4sI", b"XXXX", 0) * 200_000,
        b"P6 #" + b"a" * 100_000 + b"\n8 8 255 " + bytes(192),
        tiff_of_strips(4), tiff_of_strips(60_000),
    ])  # fmt: skip
    def test_files_of_very_many_parts_are_refused(self, uploads, data) -> None:
        with pytest.raises(
            InputError, match=r"^the image .*([0-9],[0-9]{3}|lie on each other).*save it"
        ):
            uploads.decode_image(data)

    def test_strips_that_cover_an_image_once_are_read(self, uploads) -> None:
        assert uploads.decode_image(tiff_of_strips(2)).max() == 0

    def test_only_the_tags_of_pixels_are_left_of_a_tiff(self) -> None:
        data = encode(TURNED, "TIFF", exif=exif_of(ROTATED_90), xmp=XMP, save_all=True,
                      append_images=[KNOWN])  # fmt: skip
        with Image.open(CountedFile(strip_metadata(data))) as image:
            assert 34665 not in image.tag_v2
            assert image.n_frames == 1

    def test_reads_are_counted(self) -> None:
        file = CountedFile(b"x" * 10)
        for _ in range(MAX_PARTS):
            file.read(1)
        with pytest.raises(ValueError, match="more than 20,000 parts, which is the limit"):
            file.read(1)

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "GIF"])
    def test_damaged_files_are_read_or_refused(self, uploads, kind) -> None:
        whole = encode(KNOWN, kind, exif=exif_of(ROTATED_90))
        rng = np.random.default_rng(0)
        for _ in range(200):
            data = np.frombuffer(whole, np.uint8)[: rng.integers(4, len(whole) + 1)].copy()
            at = rng.integers(4, len(data) + 1, 4) - 1
            data[at] = rng.integers(0, 256, 4)
            with contextlib.suppress(InputError):  # and no other error
                uploads.decode_image(data.tobytes())
