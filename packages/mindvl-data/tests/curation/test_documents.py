# SPDX-License-Identifier: Apache-2.0
"""PDFs become page records and interleaved records; damaged and hostile PDFs are refused."""

import io
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindvl_data.curation.config import CurationConfig, InputConfig, StepConfig
from mindvl_data.curation.coverage import RenderRareConfig, TextCoverageConfig
from mindvl_data.curation.documents import (
    PROMPTS,
    CleanDocumentConfig,
    DocumentTextConfig,
    PdfInterleavedConfig,
    PdfPagesConfig,
    clean_document,
    document_text,
    pdf_interleaved,
    pdf_pages,
)
from mindvl_data.curation.duplicates.exact import ExactDuplicates
from mindvl_data.curation.pdf_writing import PlacedImage, PlacedText, write_pdf
from mindvl_data.curation.pipeline import curate
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Drop
from mindvl_data.errors import SampleError

pytest.importorskip("pypdfium2")
RED = np.full((80, 120, 3), (200, 30, 30), np.uint8)
BLUE = np.full((100, 100, 3), (20, 30, 200), np.uint8)


def pages_of(content: bytes, **config: Any) -> list[Record]:
    outcome = pdf_pages(
        [Record(number=7, id="a.pdf", body={"url": "u"}, media=(content,))], PdfPagesConfig(**config), CONTEXT
    )
    assert isinstance(outcome[0], list)
    return outcome[0]


def paragraph(x: float, y: float, lines: Sequence[str], size: float = 10.0) -> list[PlacedText]:
    return [PlacedText(x, y + 1.3 * size * index, line, size) for index, line in enumerate(lines)]


CONTEXT = Context(seed=3, cache=Path("unused"))


def test_each_page_becomes_a_pair_of_its_image_and_its_markdown() -> None:
    content = write_pdf(
        [
            [
                PlacedText(72, 90, "A title", 20),
                *paragraph(72, 130, ["The first line of a long para-", "graph ends here."]),
            ],
            [PlacedText(72, 90, "The second page is short.")],
        ]
    )
    first, second = pages_of(content, dpi=72)
    assert first.answers() == ["# A title\n\nThe first line of a long paragraph ends here."]
    assert second.answers() == ["The second page is short."]
    assert (first.number, first.piece, second.piece, second.id) == (7, 0, 1, "a.pdf:page 2")
    assert first.texts()[0] in PROMPTS
    assert first.body["url"] == "u"
    assert first.facts == {"page": 1}
    assert first.image().shape == (842, 595, 3)


def test_the_number_of_pixels_of_a_page_is_limited() -> None:
    (page,) = pages_of(write_pdf([[PlacedText(10, 50, "wide")]], size=(4000, 1000)), dpi=144, max_pixels=1_000_000)
    assert page.image().shape == (500, 2000, 3)  # 2000 x 500 = 1,000,000 instead of 8000 x 2000


def test_a_rotated_page_is_read_as_it_is_displayed() -> None:
    content = write_pdf([[PlacedText(72, 90, "upright only if not rotated")]])
    turned = content.replace(b"/Type /Page /Parent", b"/Type /Page /Rotate 90 /Parent")
    (page,) = pages_of(turned, dpi=36)
    assert page.image().shape == (298, 421, 3)
    assert page.answers() == [""]  # the text runs downwards on the displayed page


def test_embedded_images_are_placed_between_the_texts_around_them() -> None:
    content = write_pdf(
        [
            [
                PlacedText(72, 400, "Below the image."),
                PlacedText(72, 90, "Above the image."),
                PlacedImage(72, 120, 240, 160, RED),
            ],
            [PlacedImage(72, 100, 100, 100, BLUE), PlacedText(72, 250, "After the second image.")],
        ]
    )
    ((record,),) = pdf_interleaved(
        [Record(number=1, id="a.pdf", body={}, media=(content,))], PdfInterleavedConfig(), CONTEXT
    )  # type: ignore[misc]
    assert record.body["content"] == [
        {"type": "text", "text": "Above the image.\n\n"},
        {"type": "image"},
        {"type": "text", "text": "\n\nBelow the image.\n\n"},
        {"type": "image"},
        {"type": "text", "text": "\n\nAfter the second image."},
    ]
    np.testing.assert_array_equal(record.image(0), RED)
    np.testing.assert_array_equal(record.image(1), BLUE)


def test_interleaved_documents_are_divided_and_parts_without_an_image_left_out() -> None:
    image = PlacedImage(72, 120, 120, 80, RED)
    content = write_pdf(
        [[PlacedText(72, 90, "one")], [PlacedText(72, 90, "two"), image], [PlacedText(72, 90, "three")]]
    )
    record = Record(number=1, id="a.pdf", body={}, media=(content,))
    ((part,),) = pdf_interleaved([record], PdfInterleavedConfig(pages_per_record=1), CONTEXT)  # type: ignore[misc]
    assert (part.text(), part.facts, part.id) == ("two\n\n", {"page": 2, "num_images": 1}, "a.pdf:part 1")


def test_a_document_without_images_or_with_a_logo_only_is_dropped_from_interleaved_data() -> None:
    logo = PlacedImage(400, 20, 60, 40, RED)
    text_only, with_logo = write_pdf([[PlacedText(72, 90, "one")]]), write_pdf([[PlacedText(72, 90, "one"), logo]] * 3)
    records = [Record(number=i, id="a", body={}, media=(content,)) for i, content in enumerate([text_only, with_logo])]
    outcomes = pdf_interleaved(records, PdfInterleavedConfig(), CONTEXT)
    assert [outcome.reason for outcome in outcomes if isinstance(outcome, Drop)] == ["text_only", "text_only"]


def refused(content: bytes, **limits: Any) -> str:
    with pytest.raises(SampleError) as error:
        pages_of(content, **limits)
    return str(error.value)


def test_damaged_and_large_pdfs_are_refused_with_the_limit() -> None:
    content = write_pdf([[PlacedText(72, 90, "one")]] * 3)
    assert "is not a PDF" in refused(b"MZ" + bytes(100))
    assert "is damaged" in refused(b"%PDF-1.7\n" + bytes(1000))
    assert "is damaged" in refused(content[:60])
    assert "3 pages, the limit is 2 (max_pages)" in refused(content, max_pages=2)
    assert "the limit is 100 (max_bytes)" in refused(content, max_bytes=100)
    assert "3 characters, the limit is 2 (max_characters)" in refused(content, max_characters=2)
    assert "more than 0 seconds" in refused(content, seconds=0)


def test_an_encrypted_pdf_is_refused() -> None:
    content = write_pdf([[PlacedText(72, 90, "one")]])
    entry = b"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <%s> /U <%s> >> /ID [<00> <00>] " % (
        b"0" * 64,
        b"1" * 64,
    )
    assert (
        refused(content.replace(b"/Root 1 0 R", entry + b"/Root 1 0 R")) == "the PDF is encrypted and needs a password"
    )


def test_an_image_that_declares_too_many_pixels_is_left_out_and_decompression_is_bounded() -> None:
    bomb = zlib.compress(bytes(30_000_000))
    image = write_pdf([[PlacedText(72, 90, "text"), PlacedImage(72, 120, 120, 80, RED)]])
    inflated = image.replace(b"/Width 120 /Height 80", b"/Width 60000 /Height 60000")
    record = Record(number=1, id="a.pdf", body={}, media=(inflated,))
    assert isinstance(pdf_interleaved([record], PdfInterleavedConfig(), CONTEXT)[0], Drop)
    content = write_pdf([[]])
    packed = content.replace(b"/Length 8 /Filter", b"/Length %d /Filter" % len(bomb))
    start = packed.index(b"stream\n") + 7
    assert pages_of(packed[:start] + bomb + packed[start + 8 :], dpi=18)[0].answers() == [""]


def test_pages_without_text_with_garbled_text_and_without_an_image_are_dropped_for_that_reason() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (10, 10)).save(buffer, "PNG")

    def record(text: str, media: tuple[bytes, ...] = (buffer.getvalue(),)) -> Record:
        return Record(number=0, id="a", body={"content": text}, media=media)

    config = DocumentTextConfig(min_characters=5, max_characters=40)
    texts = ["", "four", "x" * 41, "\ufffd good text", "entirely good text"]
    outcomes = document_text([*map(record, texts), record("no image at all", ())], config, CONTEXT)
    assert [outcome.reason if isinstance(outcome, Drop) else "" for outcome in outcomes] == [
        "no_text",
        "short",
        "long",
        "garbled",
        "",
        "text_only",
    ]
    kept = outcomes[4]
    assert isinstance(kept, Record)
    assert kept.facts == {"num_characters": 16, "garbled": 0.0}


def test_cleaning_removes_markers_of_images_from_pairs_and_keeps_them_on_request() -> None:
    record = Record(number=0, id="a", body={"content": "see ![x](a.png) and <image>\ufb01ne"})
    (cleaned,) = clean_document([record], CleanDocumentConfig(), CONTEXT)
    (kept,) = clean_document([record], CleanDocumentConfig(keep_image_markers=True), CONTEXT)
    assert isinstance(cleaned, Record)
    assert cleaned.text() == "see and fine"
    assert isinstance(kept, Record)
    assert kept.text() == "see ![x](a.png) and <image>fine"


def test_parameters_outside_their_range_name_the_parameter() -> None:
    with pytest.raises(ValueError, match="dpi: must be from 18 to 600, got 1000"):
        PdfPagesConfig(dpi=1000)
    with pytest.raises(ValueError, match="pages_per_record: must be at least 1, got 0"):
        PdfInterleavedConfig(pages_per_record=0)


@pytest.mark.slow
def test_a_pipeline_makes_shards_from_good_pdfs_and_quarantines_bad_ones_with_their_reason(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")  # contains the font of the rare character
    good = [
        f"Document number {number} has a text of its own, about the letter {chr(97 + number)}." for number in range(4)
    ]
    (tmp_path / "in").mkdir()
    for number, text in enumerate(good):
        pages = [[PlacedText(72, 200, text)], [PlacedText(72, 200, good[0])], [PlacedText(72, 200, "short")]]
        (tmp_path / "in" / f"{number}.pdf").write_bytes(write_pdf(pages))
    (tmp_path / "in" / "bad.pdf").write_bytes(write_pdf([[PlacedText(72, 90, "one")]])[:60])
    (tmp_path / "in" / "long.pdf").write_bytes(write_pdf([[]] * 9))
    steps: list[tuple[str, Any]] = [
        ("pdf_pages", PdfPagesConfig(dpi=36, max_pages=8)),
        ("document_text", DocumentTextConfig()),
        ("exact_duplicates", ExactDuplicates(content="text")),
        ("text_coverage", TextCoverageConfig(min_character_count=2)),
        ("render_rare", RenderRareConfig()),
    ]
    config = CurationConfig(
        name="documents",
        inputs=(InputConfig(path=str(tmp_path / "in"), format="pdf"),),
        steps=tuple(StepConfig(step=name, parameters=parameters) for name, parameters in steps),
        out=tmp_path / "out",
    )
    result = curate(config, workers=1)
    counts = [(step["step"], step["out"], step["dropped"]) for step in result.manifest["steps"]]
    assert counts == [
        ("pdf_pages", 12, {}),
        ("document_text", 8, {"short": 4}),
        ("exact_duplicates", 4, {"exact_duplicate": 4}),
        ("text_coverage", 4, {}),
        ("render_rare", 8, {}),  # 0, 1, 2 and 3 are in one text each, and so is a small d
    ]
    quarantined = [json.loads(line) for line in (result.out / "quarantine.jsonl").read_text().splitlines()]
    reasons = {Path(entry["id"]).name: entry["reason"] for entry in quarantined}
    assert sorted(reasons) == ["bad.pdf", "long.pdf"]
    assert "is damaged" in reasons["bad.pdf"]
    assert "9 pages, the limit is 8 (max_pages)" in reasons["long.pdf"]
