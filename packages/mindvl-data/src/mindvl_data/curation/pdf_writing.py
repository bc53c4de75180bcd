# SPDX-License-Identifier: Apache-2.0
"""Writes simple PDFs with text and images at given places, for tests and for the comparison of curated with raw documents.

Follows ISO 32000-1: standard fonts, text in the encoding of Windows (cp1252), images as raw RGB compressed by zlib.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

A4 = (595.0, 842.0)  # points
_FONTS = ("Helvetica", "Helvetica-Bold", "Times-Roman", "Courier")


@dataclass(frozen=True)
class PlacedText:
    """Text whose baseline begins at (x, y), in points from the upper left corner of the page."""

    x: float
    y: float
    text: str
    size: float = 10.0
    font: str = "Helvetica"


@dataclass(frozen=True)
class PlacedImage:
    """An image [H, W, 3]; (x, y) is its upper left corner, in points from that of the page."""

    x: float
    y: float
    width: float
    height: float
    pixels: NDArray[np.uint8]


def write_pdf(pages: Sequence[Sequence[PlacedText | PlacedImage]], size: tuple[float, float] = A4) -> bytes:
    """A PDF with these pages; equal arguments give equal bytes.

    Args:
        pages: What is on each page.
        size: Width and height of every page in points.
    """
    objects: list[bytes] = [b"<< /Type /Catalog /Pages 2 0 R >>", b""]
    fonts = b" ".join(b"/F%d %d 0 R" % (index, index + 3) for index in range(len(_FONTS)))
    objects += [
        b"<< /Type /Font /Subtype /Type1 /BaseFont /%s /Encoding /WinAnsiEncoding >>" % name.encode() for name in _FONTS
    ]
    kids: list[int] = []
    for page in pages:
        commands: list[bytes] = []
        images: list[bytes] = []
        for item in page:
            if isinstance(item, PlacedText):
                commands.append(_text(item, size[1]))
                continue
            objects.append(_image(item.pixels))
            name = b"/I%d" % len(images)
            images.append(b"%s %d 0 R" % (name, len(objects)))
            place = (item.width, item.height, item.x, size[1] - item.y - item.height)
            commands.append(b"q %g 0 0 %g %g %g cm %s Do Q" % (*place, name))
        objects.append(_stream(b"\n".join(commands)))
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 %g %g] /Contents %d 0 R /Resources << /Font << %s >> "
            b"/XObject << %s >> >> >>" % (*size, len(objects), fonts, b" ".join(images))
        )
        kids.append(len(objects))
    objects[1] = b"<< /Type /Pages /Count %d /Kids [%s] >>" % (len(kids), b" ".join(b"%d 0 R" % kid for kid in kids))
    return _file(objects)


def _text(item: PlacedText, height: float) -> bytes:
    encoded = item.text.encode("cp1252", "replace").replace(b"\\", b"\\\\").replace(b"(", b"\\(").replace(b")", b"\\)")
    where = (_FONTS.index(item.font), item.size, item.x, height - item.y)
    return b"BT /F%d %g Tf %g %g Td (%s) Tj ET" % (*where, encoded)


def _image(pixels: NDArray[np.uint8]) -> bytes:
    height, width = pixels.shape[:2]
    entries = b"/Type /XObject /Subtype /Image /Width %d /Height %d /ColorSpace /DeviceRGB /BitsPerComponent 8 " % (
        width,
        height,
    )
    return _stream(np.ascontiguousarray(pixels[..., :3]).tobytes(), entries)


def _stream(content: bytes, entries: bytes = b"") -> bytes:
    packed = zlib.compress(content, 6)
    return b"<< %s/Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (entries, len(packed), packed)


def _file(objects: Sequence[bytes]) -> bytes:
    result = bytearray(b"%PDF-1.4\n")
    offsets: list[int] = []
    for number, content in enumerate(objects, start=1):
        offsets.append(len(result))
        result += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    start = len(result)
    result += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    result += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    result += b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)
    return bytes(result)
