# SPDX-License-Identifier: Apache-2.0
"""Written PDFs are read by another library as they were described."""

import numpy as np
import pytest

from mindvl_data.curation.pdf_writing import PlacedImage, PlacedText, write_pdf

pdfium = pytest.importorskip("pypdfium2")


def test_pages_texts_and_images_are_found_by_pdfium() -> None:
    pixels = np.arange(64 * 96 * 3, dtype=np.uint8).reshape(64, 96, 3)
    content = write_pdf(
        [[PlacedText(50, 60, r"caf\u00e9 (100\%)")], [PlacedImage(10, 20, 96, 64, pixels)]], size=(300, 400)
    )
    document = pdfium.PdfDocument(content)
    assert len(document) == 2
    assert document[0].get_textpage().get_text_range() == r"caf\u00e9 (100\%)"
    assert document[0].get_size() == (300, 400)
    (image,) = document[1].get_objects()
    np.testing.assert_array_equal(image.get_bitmap().to_numpy()[..., ::-1], pixels)
    assert image.get_bounds() == (10, 400 - 20 - 64, 106, 380)


def test_equal_pages_give_equal_bytes() -> None:
    assert write_pdf([[PlacedText(50, 60, "a")]]) == write_pdf([[PlacedText(50, 60, "a")]])
