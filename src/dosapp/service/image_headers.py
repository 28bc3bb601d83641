"""What of an image file reaches Pillow: pixels and orientation, and no other metadata.

Pillow parses all metadata of a file in Python, most of it when the file is opened: texts and
profiles are inflated, EXIF segments are joined one by one, tags are converted. A small file could
take seconds in this way. So metadata is left out before, and the reads that are left are counted.
"""

import io
import re
import struct
import zlib
from collections.abc import Iterator
from typing import Any

MAX_PARTS = 20_000  # of a file (chunks, segments, reads), and one per `BYTES_PER_PART`
BYTES_PER_PART = 256
MAX_SEGMENTS = 1_000  # of a JPEG before its pixels; usual ones have about ten, of up to 64 kB
MAX_TABLES = 65_536  # bytes of a JPEG's head without metadata; usual ones have about 1,000
MAX_TEXT = 1_000_000  # bytes of an inflated text
MAX_VALUES = 50_000  # of a tag of a TIFF; a strip of one row has one
MAX_ENTRIES = 1_000  # of EXIF or of a TIFF

ORIENTATION = 274  # a tag
XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')

PNG_START = b"\x89PNG\r\n\x1a\n"
PNG_KEPT = {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"}
PNG_MAX_SIZES = {b"IHDR": 13, b"PLTE": 768, b"tRNS": 256}
RAW_EXIF, PNG_XMP = b"Raw profile type exif", b"XML:com.adobe.xmp"  # keywords of texts

JPEG_START = b"\xff\xd8\xff"
JPEG_MARKER = re.compile(rb"\xff([\x01-\xfe])")
JPEG_ALONE = {0x01, *range(0xD0, 0xDA)}  # markers without data
JPEG_SCAN, JFIF, APP1, ADOBE, APP15, COMMENT = 0xDA, 0xE0, 0xE1, 0xEE, 0xEF, 0xFE
JPEG_COLOURS = {JFIF: (b"JFIF\0", 14), ADOBE: (b"Adobe", 12)}  # how they start, bytes that count
EXIF, JPEG_XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"

WEBP_KEPT = {b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF"}
WEBP_METADATA, WEBP_EXIF = 0x20 | 0x08 | 0x04, 0x08  # flags of VP8X
# Memory of libwebp for the tables of five prefix codes, which each 4 × 4 pixels may have: at most,
# and by what they take in the file (at least 20 bits, for tables of 5.7 kB).
WEBP_CODES, WEBP_CODES_PER_BYTE, WEBP_MAX_CODES = 20_600, 2_300, 65_536

TIFF_STARTS = {b"II*\0": "<", b"MM\0*": ">", b"II+\0": "<", b"MM\0+": ">"}
TIFF_BYTES = {1, 2, 6, 7}  # types that are not converted value by value
TIFF_KEPT = {
    *range(254, 260), 262, 266, 273, ORIENTATION, 277, 278, 279, 284, 292, 293, 317, 320, 322, 323,
    324, 325, 332, 338, 339, 347, *range(512, 522), 529, 530, 531, 532, 700,
}  # fmt: skip


class CountedFile(io.BytesIO):
    """A file in memory that refuses to be read in very many small parts.

    Raises:
        ValueError: On a read after the last one that the file's size allows.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._most = self._left = count_parts(data)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as any file."""
        self._left -= 1
        if self._left < 0:
            raise _too_many(self._most, "parts")
        return super().read(size)


def count_parts(data: bytes) -> int:
    """How many parts a file may have; usual ones are of some thousand bytes."""
    return MAX_PARTS + len(data) // BYTES_PER_PART


def strip_metadata(data: bytes) -> bytes:
    """Leave out what changes neither the pixels of an image nor its orientation.

    Args:
        data: An image file, or any bytes.

    Returns:
        The file without other metadata; formats that have none, and other bytes, as they are.

    Raises:
        ValueError: The file has far more parts than usual ones.
    """
    if data.startswith(PNG_START):
        return _strip_png(data)
    if data.startswith(JPEG_START):
        return _strip_jpeg(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _strip_webp(data)
    if data[:4] in TIFF_STARTS:
        return _strip_tiff(data)
    return data


def _strip_png(data: bytes) -> bytes:
    kept, exif, texts = [PNG_START], b"", dict[bytes, bytes]()
    for kind, start, size in _iter_chunks(data, len(PNG_START), is_png=True):
        if kind in PNG_KEPT and size <= PNG_MAX_SIZES.get(kind, size):
            kept.append(data[start - 8 : start + size + 4])
        elif kind == b"eXIf" and not exif:
            exif = data[start : start + size]
        elif kind in (b"tEXt", b"zTXt", b"iTXt"):
            keyword = data[start : start + 80].partition(b"\0")[0]
            if keyword in (RAW_EXIF, PNG_XMP) and keyword not in texts:
                texts[keyword] = _read_text(kind, data[start + len(keyword) + 1 : start + size])
        if kind == b"IEND":
            break
    if not exif and RAW_EXIF in texts:
        exif = _read_hex(b"".join(texts[RAW_EXIF].split(b"\n")[3:]))
    if turned := find_orientation(exif, texts.get(PNG_XMP, b"")):
        chunk = b"eXIf" + _encode_orientation(turned)
        length, checksum = (struct.pack(">I", n) for n in (len(chunk) - 4, zlib.crc32(chunk)))
        kept.insert(2, length + chunk + checksum)
    return b"".join(kept)


def _strip_jpeg(data: bytes) -> bytes:
    kept, exif, xmp, position, size = [data[:2]], b"", b"", 2, 0
    for _ in range(MAX_SEGMENTS):
        found = JPEG_MARKER.search(data, position)
        if found is None:
            return b"".join(kept)
        marker, start = found[1][0], found.start()
        if marker == JPEG_SCAN:
            if turned := find_orientation(exif, xmp):
                kept.insert(1, _encode_segment(APP1, EXIF + _encode_orientation(turned)))
            return b"".join([*kept, data[start:]])
        length = 0 if marker in JPEG_ALONE else int.from_bytes(data[start + 2 : start + 4], "big")
        position = start + 2 + length
        content = data[start + 4 : position]
        if marker == APP1:
            if content.startswith(EXIF) and not exif:
                exif = content
            elif content.startswith(JPEG_XMP):
                xmp = content
        elif marker in JPEG_COLOURS:
            prefix, most = JPEG_COLOURS[marker]
            if content.startswith(prefix):
                kept.append(_encode_segment(marker, content[:most]))
                size += most
        elif not JFIF <= marker <= APP15 and marker != COMMENT:
            kept.append(data[start:position])
            size += position - start
        if size > MAX_TABLES:
            raise _too_many(MAX_TABLES, "bytes of tables")
    raise _too_many(MAX_SEGMENTS, "segments")


def _encode_segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def _strip_webp(data: bytes) -> bytes:
    kept, exif, xmp = [], b"", b""
    end = min(len(data), 8 + int.from_bytes(data[4:8], "little"))
    for kind, start, size in _iter_chunks(data[:end], 12, is_png=False):
        if kind in WEBP_KEPT:
            kept.append(data[start - 8 : min(start + size + size % 2, end)])
        elif kind == b"EXIF" and not exif:
            exif = data[start : start + size]
        elif kind == b"XMP " and not xmp:
            xmp = data[start : start + size]
    if kept and kept[0].startswith(b"VP8X") and len(kept[0]) > 8:
        flags, turned = kept[0][8] & ~WEBP_METADATA, find_orientation(exif, xmp)
        if turned:
            content = _encode_orientation(turned)
            kept.append(struct.pack("<4sI", b"EXIF", len(content)) + content)
            flags |= WEBP_EXIF
        kept[0] = kept[0][:8] + bytes([flags]) + kept[0][9:]
    body = b"WEBP" + b"".join(kept)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def bound_webp_tables(data: bytes, width: int, height: int) -> int:
    """Bound the memory for tables of a WebP with lossless pixels or alpha, in bytes.

    How many it has is known only when most of it is decoded. A file could have 1.3 GB of them, at
    one megapixel.
    """
    if b"VP8L" not in data and b"ALPH" not in data:
        return 0
    chunks = _iter_chunks(data, 12, is_png=False)
    lossless = sum(size for kind, _, size in chunks if kind != b"VP8 ")
    blocks = min(-(-width // 4) * -(-height // 4), WEBP_MAX_CODES)
    return min(WEBP_CODES * blocks, WEBP_CODES_PER_BYTE * lossless)


def _strip_tiff(data: bytes) -> bytes:
    """Keep the first directory, and of its tags those that say how to read the pixels."""
    tags = _find_tags(data)
    if tags is None:
        return data
    start, count_format, entry_format, end_format = tags
    entries = [
        (tag, kind, count, value)
        for tag, kind, count, value in _iter_tags(data, *tags)
        if tag in TIFF_KEPT
    ]
    if any(count > MAX_VALUES and kind not in TIFF_BYTES for _, kind, count, _ in entries):
        raise _too_many(MAX_VALUES, "values in a tag")
    directory = b"".join([
        struct.pack(count_format, len(entries)),
        *(struct.pack(entry_format, *entry) for entry in entries),
        struct.pack(end_format, 0),
    ])  # fmt: skip
    return data[:start] + directory + data[start + len(directory) :]


def _find_tags(data: bytes) -> tuple[int, str, str, str] | None:
    """Where the first directory of a TIFF is, and the formats of its count, entries and end."""
    order = TIFF_STARTS.get(data[:4])
    if order is None or len(data) < 16:
        return None
    if b"+" in data[:4]:
        start, formats = struct.unpack_from(order + "Q", data, 8)[0], ("Q", "HHQ8s", "Q")
    else:
        start, formats = struct.unpack_from(order + "I", data, 4)[0], ("H", "HHI4s", "I")
    if start + struct.calcsize(order + formats[0]) > len(data):
        return None
    count, entry, end = (order + part for part in formats)
    return start, count, entry, end


def _iter_tags(
    data: bytes, start: int, count_format: str, entry_format: str, _: str
) -> Iterator[tuple[Any, ...]]:
    """Number, type, count and value of tags; at most `MAX_ENTRIES`, far more than are usual."""
    [count] = struct.unpack_from(count_format, data, start)
    start += struct.calcsize(count_format)
    size = struct.calcsize(entry_format)
    count = min(count, MAX_ENTRIES, (len(data) - start) // size)
    return struct.iter_unpack(entry_format, data[start : start + count * size])


def find_orientation(exif: bytes, xmp: bytes) -> int | None:
    """Find how an image is turned.

    Args:
        exif: An EXIF record, with or without its name before it, or nothing.
        xmp: An XMP packet, which counts if EXIF does not tell, or nothing.

    Returns:
        2 to 8; None if it is upright or not known.
    """
    orientation = None
    while exif.startswith(EXIF):
        exif = exif[len(EXIF) :]
    tags = _find_tags(exif)
    for tag, kind, count, value in _iter_tags(exif, *tags) if tags else ():
        if tag == ORIENTATION and kind in (3, 4) and count:
            size = {3: "H", 4: "I"}[kind]
            orientation = struct.unpack_from(TIFF_STARTS[exif[:4]] + size, value)[0]
            break
    if orientation is None and (found := XMP_ORIENTATION.search(xmp)):
        orientation = int(found[1])
    return orientation if orientation in range(2, 9) else None


def _encode_orientation(orientation: int) -> bytes:
    """An EXIF record of this tag alone."""
    return struct.pack("<4sIHHHIII", b"II*\0", 8, 1, ORIENTATION, 3, 1, orientation, 0)


def _iter_chunks(data: bytes, position: int, is_png: bool) -> Iterator[tuple[bytes, int, int]]:
    """Kind, start of the content and its size, of the chunks of a PNG or WebP.

    Raises:
        ValueError: There are too many.
    """
    for _ in range(count_parts(data)):
        first, second = data[position : position + 4], data[position + 4 : position + 8]
        if len(second) < 4:
            return
        if is_png:
            kind, size = second, int.from_bytes(first, "big")
        else:
            kind, size = first, int.from_bytes(second, "little")
        yield kind, position + 8, size
        position += 8 + size + (4 if is_png else size % 2)  # a checksum; an even size
    raise _too_many(count_parts(data), "parts")


def _read_text(kind: bytes, content: bytes) -> bytes:
    """The text of a PNG's chunk, without its keyword; nothing if it is damaged or too long."""
    is_compressed = kind == b"zTXt"
    if kind == b"iTXt":
        is_compressed = content[:1] == b"\1"
        content = content[2:].partition(b"\0")[2].partition(b"\0")[2]
    elif is_compressed:
        content = content[1:]
    if not is_compressed:
        return content
    try:
        return zlib.decompressobj().decompress(content, MAX_TEXT)
    except zlib.error:
        return b""


def _too_many(most: int, things: str) -> ValueError:
    """The reason that a file is refused; who reads the file adds its name."""
    return ValueError(f"more than {most:,} {things}, which is the limit; save it again")


def _read_hex(text: bytes) -> bytes:
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return b""
