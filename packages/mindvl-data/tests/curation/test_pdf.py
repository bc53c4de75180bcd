# SPDX-License-Identifier: Apache-2.0
"""Words, figures and images of the pages of a PDF."""

import io

import numpy as np
import pytest
from PIL import Image

from mindvl_data.curation.pdf import PdfLimits, read_pages
from mindvl_data.curation.pdf_writing import PlacedImage, PlacedText, write_pdf

pytest.importorskip("pypdfium2")


def test_words_have_their_place_from_the_upper_left_corner_and_their_font_size() -> None:
    (page,) = read_pages(write_pdf([[PlacedText(72, 100, "two words", 12)]]), PdfLimits())
    first, second = page.words
    assert (first.text, second.text, first.size) == ("two", "words", 12)
    assert first.x0 == pytest.approx(72, abs=1)
    assert first.y0 < 100 - 5 < 100 < first.y1 < 105  # the baseline is at 100
    assert first.x1 < second.x0
    assert (page.number, page.width, page.height, page.image) == (1, 595, 842, b"")


def test_on_a_rotated_page_words_have_their_displayed_place_and_text_along_another_direction_is_left_out() -> None:
    # The page is displayed turned by 90 degrees clockwise; the second text is drawn so that it is upright then.
    content = write_pdf([[PlacedText(72, 100, "sideways"), PlacedText(0, 0, "upright")]], size=(600, 800))
    upright = write_pdf([[PlacedText(72, 100, "sideways")]], size=(600, 800))
    assert [word.text for word in next(read_pages(content, PdfLimits())).words] == ["sideways", "upright"]
    turned = upright.replace(b"/Type /Page /Parent", b"/Type /Page /Rotate 90 /Parent")
    page = next(read_pages(turned, PdfLimits()))
    assert (page.width, page.height, page.words) == (800, 600, ())


def test_a_rendered_page_shows_text_where_the_words_are() -> None:
    (page,) = read_pages(write_pdf([[PlacedText(72, 100, "x" * 30)]]), PdfLimits(), dpi=72)
    dark = np.argwhere(np.array(Image.open(io.BytesIO(page.image)).convert("L")) < 128)
    (word,) = page.words
    assert word.y0 - 1 <= dark[:, 0].min() <= dark[:, 0].max() <= word.y1 + 1
    assert word.x0 - 2 <= dark[:, 1].min() <= dark[:, 1].max() <= word.x1 + 2


def test_small_images_and_images_of_the_whole_page_are_no_figures() -> None:
    pixels = np.full((64, 64, 3), 90, np.uint8)
    small, whole = PlacedImage(10, 10, 50, 50, pixels[:20]), PlacedImage(0, 0, 595, 842, pixels)
    figure = PlacedImage(100, 200, 64, 32, pixels)
    (page,) = read_pages(write_pdf([[small, whole, figure]]), PdfLimits(), figures=True)
    (found,) = page.figures
    assert [round(value) for value in (found.x0, found.y0, found.x1, found.y1)] == [100, 200, 164, 232]
    assert next(read_pages(write_pdf([[figure]]), PdfLimits())).figures == ()
