# SPDX-License-Identifier: Apache-2.0
"""PDF -> for each page its words with positions, its embedded images and its rendered image, within limits.

Comes before page_layout.py, which puts the words into reading order. A PDF is hostile input: every number that it declares is
compared with a limit before memory is allocated, and the time is checked between pages, words and images. A call into pdfium
that never returns is ended by the engine, which replaces the worker.
"""

import ctypes
import io
import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from PIL import Image

from mindvl_data.curation.extras import require
from mindvl_data.errors import SampleError

_CHECK_EVERY = 256  # characters between two checks of the time
_FINE = 100  # display units per point when the transformation of a page is measured
_LINE_END_HYPHEN = 2  # what pdfium returns for a hyphen that it found at the end of a line
_SCAN_SHARE = 0.85  # an image that covers more of the page is the page itself (a scan), not a figure
_MAX_FORM_DEPTH = 4
_PASSWORD_ERROR = 4  # FPDF_ERR_PASSWORD


@dataclass(frozen=True, kw_only=True)
class PdfLimits:
    """Limits of one document; a document beyond them is refused, an image beyond them is left out.

    Attributes:
        max_bytes: Maximum size of the file in bytes.
        max_pages: Maximum number of pages of the document.
        max_characters: Maximum number of characters of a page.
        max_pixels: Maximum number of pixels of a rendered page, and of an embedded image. Larger pages are rendered at a lower
            resolution.
        max_images: Maximum number of embedded images of a document.
        min_image_side: Smaller embedded images (rules, icons) are left out, in pixels.
        seconds: Maximum time for the document in seconds. A larger value also needs a larger `limits.seconds_per_record` of
            the pipeline.
    """

    max_bytes: int = 200_000_000
    max_pages: int = 500
    max_characters: int = 200_000
    max_pixels: int = 8_000_000
    max_images: int = 1000
    min_image_side: int = 64
    seconds: float = 50.0


@dataclass(frozen=True)
class Word:
    """Characters without a space between them; coordinates in points from the upper left corner of the displayed page."""

    text: str
    x0: float
    y0: float
    x1: float
    y1: float
    size: float  # font size in points


@dataclass(frozen=True)
class Figure:
    """An embedded image, encoded as JPEG if the PDF stores it so, otherwise as PNG."""

    content: bytes
    x0: float
    y0: float
    x1: float
    y1: float


@dataclass(frozen=True)
class Page:
    """What a page shows. `image` is the rendered page (PNG), empty if it was not asked for."""

    number: int  # from 1
    width: float  # points, as displayed
    height: float
    words: tuple[Word, ...]
    figures: tuple[Figure, ...]
    image: bytes


def read_pages(content: bytes, limits: PdfLimits, *, dpi: int = 0, figures: bool = False) -> Iterator[Page]:
    """Read the pages of a PDF in order.

    Args:
        content: The file.
        limits: Limits; see PdfLimits.
        dpi: Resolution of the rendered pages in pixels per inch; 0: do not render.
        figures: Extract embedded images.

    Raises:
        SampleError: The PDF is damaged, encrypted, or beyond a limit.
    """
    library = require("pypdfium2", extra="curation")
    deadline = _Deadline(limits.seconds)
    if len(content) > limits.max_bytes:
        raise SampleError(f"the PDF has {len(content)} bytes, the limit is {limits.max_bytes} (max_bytes)")
    try:
        document = library.PdfDocument(content)
    except library.PdfiumError as error:
        if getattr(error, "err_code", None) == _PASSWORD_ERROR:
            raise SampleError("the PDF is encrypted and needs a password") from error
        raise SampleError(f"the PDF is damaged ({error})") from error
    with closing(document):
        if len(document) > limits.max_pages:
            raise SampleError(f"the PDF has {len(document)} pages, the limit is {limits.max_pages} (max_pages)")
        num_images = 0
        for index in range(len(document)):
            deadline.check()
            try:
                with closing(document[index]) as page:
                    found = _read_page(library, page, index + 1, limits, deadline, dpi, figures)
            except library.PdfiumError as error:
                raise SampleError(f"page {index + 1} of the PDF is damaged ({error})") from error
            num_images += len(found.figures)
            if num_images > limits.max_images:
                raise SampleError(f"the PDF has more than {limits.max_images} images (max_images)")
            yield found


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, time.monotonic() + seconds

    def check(self) -> None:
        if time.monotonic() > self._end:
            raise SampleError(f"reading the PDF takes more than {self._seconds:g} seconds (seconds)")


@dataclass(frozen=True)
class _Display:
    """The transformation from the coordinates of a page to points from the upper left corner of the displayed page."""

    origin: tuple[float, float]
    per_x: tuple[float, float]
    per_y: tuple[float, float]

    def vector(self, x: float, y: float) -> tuple[float, float]:
        return x * self.per_x[0] + y * self.per_y[0], x * self.per_x[1] + y * self.per_y[1]

    def box(self, left: float, bottom: float, right: float, top: float) -> tuple[float, float, float, float]:
        corners = [self.vector(x, y) for x in (left, right) for y in (bottom, top)]
        xs, ys = [x + self.origin[0] for x, _ in corners], [y + self.origin[1] for _, y in corners]
        return min(xs), min(ys), max(xs), max(ys)


def _read_page(
    library: Any, page: Any, number: int, limits: PdfLimits, deadline: _Deadline, dpi: int, figures: bool
) -> Page:
    width, height = page.get_size()
    if not (0 < width < 1e6 and 0 < height < 1e6):
        raise SampleError(f"page {number} of the PDF has the size {width:g} x {height:g} points")
    display = _display(library.raw, page, width, height)
    words = tuple(_words(library.raw, page, number, display, limits, deadline))
    found = tuple(_figures(library, page, display, width * height, limits, deadline)) if figures else ()
    image = b""
    if dpi:
        scale = min(dpi / 72, math.sqrt(limits.max_pixels / (width * height)))
        with closing(page.render(scale=scale, rev_byteorder=True)) as bitmap:
            image = _png(bitmap.to_pil().convert("RGB"))
        deadline.check()
    return Page(number, width, height, words, found, image)


def _display(raw: Any, page: Any, width: float, height: float) -> _Display:
    """Measure the transformation, with the crop box and the rotation of the page, at three points."""
    x, y = ctypes.c_int(), ctypes.c_int()
    size = round(width * _FINE), round(height * _FINE)

    def at(page_x: float, page_y: float) -> tuple[float, float]:
        raw.FPDF_PageToDevice(page, 0, 0, *size, 0, page_x, page_y, x, y)
        return x.value / _FINE, y.value / _FINE

    step = 100.0
    origin, right, up = at(0, 0), at(step, 0), at(0, step)
    per_x = ((right[0] - origin[0]) / step, (right[1] - origin[1]) / step)
    return _Display(origin, per_x, ((up[0] - origin[0]) / step, (up[1] - origin[1]) / step))


def _words(
    raw: Any, page: Any, number: int, display: _Display, limits: PdfLimits, deadline: _Deadline
) -> Iterator[Word]:
    """Upright words of a page, in the order of the file."""
    with closing(page.get_textpage()) as text:
        count = text.count_chars()
        if count > limits.max_characters:
            raise SampleError(
                f"page {number} of the PDF has {count} characters, the limit is {limits.max_characters} (max_characters)"
            )
        word = _WordBuilder(raw, text, display)
        for index in range(count):
            if index % _CHECK_EVERY == 0:
                deadline.check()
            yield from word.add(index)
        yield from word.close()


class _WordBuilder:
    """Joins characters to words; a word ends at a space, and where the next character is elsewhere."""

    def __init__(self, raw: Any, text: Any, display: _Display) -> None:
        self._raw, self._text, self._display = raw, text, display
        self._characters: list[str] = []
        self._box = (0.0, 0.0, 0.0, 0.0)
        self._first = 0
        self._edges = [ctypes.c_double() for _ in range(4)]
        self._loose = raw.FS_RECTF()

    def add(self, index: int) -> Iterator[Word]:
        code = self._raw.FPDFText_GetUnicode(self._text, index)
        character = "-" if code == _LINE_END_HYPHEN else chr(code) if 0 < code < 0x110000 else "\ufffd"
        if self._raw.FPDFText_HasUnicodeMapError(self._text, index) == 1:
            character = "\ufffd"
        if character.isspace() or character in "\u200b\ufeff":
            yield from self.close()
            return
        left, right, bottom, top = self._edges
        if not self._raw.FPDFText_GetCharBox(self._text, index, left, right, bottom, top):
            return
        low, high = bottom.value, top.value
        # The loose box has the height of the font, so that all words of a line have the same top and bottom.
        if self._raw.FPDFText_GetLooseCharBox(self._text, index, self._loose):
            low, high = min(low, self._loose.bottom), max(high, self._loose.top)
        box = self._display.box(left.value, low, right.value, high)
        if self._characters and self._elsewhere(box):
            yield from self.close()
        if not self._characters:
            self._first, self._box = index, box
        self._characters.append(character)
        x0, y0, x1, y1 = self._box
        self._box = min(x0, box[0]), min(y0, box[1]), max(x1, box[2]), max(y1, box[3])

    def _elsewhere(self, box: tuple[float, float, float, float]) -> bool:
        """True if a character does not continue the line to the right of the word."""
        height = max(self._box[3] - self._box[1], box[3] - box[1], 1.0)
        return box[1] > self._box[3] + height or box[3] < self._box[1] - height or box[0] < self._box[0] - height

    def close(self) -> Iterator[Word]:
        if not self._characters:
            return
        characters, self._characters = "".join(self._characters), []
        matrix = self._raw.FS_MATRIX()
        scale = 1.0
        if self._raw.FPDFText_GetMatrix(self._text, self._first, matrix):
            along = self._display.vector(matrix.a, matrix.b)
            # Text along another direction, such as a label of an axis.
            if along[0] <= 0 or abs(along[1]) > 0.3 * along[0]:
                return
            scale = math.hypot(*self._display.vector(matrix.c, matrix.d))
        size = self._raw.FPDFText_GetFontSize(self._text, self._first) * scale
        joined = characters.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        yield Word(joined, *self._box, size if 0.5 <= size <= 1000 else self._box[3] - self._box[1])


def _figures(
    library: Any, page: Any, display: _Display, page_area: float, limits: PdfLimits, deadline: _Deadline
) -> Iterator[Figure]:
    for item in page.get_objects(filter=[library.raw.FPDF_PAGEOBJ_IMAGE], max_depth=_MAX_FORM_DEPTH):
        deadline.check()
        width, height = item.get_px_size()
        if min(width, height) < limits.min_image_side or width * height > limits.max_pixels:
            continue
        # Objects in forms have coordinates of the form; their place on the page is not known to pdfium's interface.
        box = display.box(*item.get_bounds())
        if (box[2] - box[0]) * (box[3] - box[1]) > _SCAN_SHARE * page_area:
            continue
        try:
            with closing(item.get_bitmap(render=True)) as bitmap:
                if bitmap.width * bitmap.height > 2 * limits.max_pixels:
                    continue
                image = _on_white(bitmap.to_pil())
        except library.PdfiumError:  # an image that pdfium cannot decode is not shown on the rendered page either
            continue
        jpeg = item.get_filters()[-1:] == ["DCTDecode"]
        yield Figure(_jpeg(image) if jpeg else _png(image), *box)


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode not in ("RGBA", "LA", "PA"):
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=6)
    return buffer.getvalue()


def _jpeg(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=95)
    return buffer.getvalue()
