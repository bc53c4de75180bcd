# SPDX-License-Identifier: Apache-2.0
"""The intersection of two OCR engines."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw, ImageFont

from mindvl_data.curation.ocr_engines import (
    CommandOcrConfig,
    OcrLine,
    RapidOcrConfig,
    TesseractConfig,
    tesseract_languages,
)
from mindvl_data.curation.record import Record
from mindvl_data.curation.scene_ocr import SceneOcrConfig, intersect, scene_ocr, similarity
from mindvl_data.curation.step import Context, Drop

CONTEXT = Context(seed=1, cache=Path("unused"))


def answering(*lines: tuple[str, list[int]]) -> CommandOcrConfig:
    """An engine that finds these lines in every image."""
    answer = json.dumps({"lines": [{"text": text, "box": box} for text, box in lines]})
    return CommandOcrConfig(
        command=(sys.executable, "-c", "import sys\nfor _ in sys.stdin: print(sys.argv[1], flush=True)", answer)
    )


def photo(*texts: str) -> Record:
    image = Image.new("RGB", (560, 30 + 70 * len(texts)), "white")
    for index, text in enumerate(texts):
        ImageDraw.Draw(image).text((20, 20 + 70 * index), text, font=ImageFont.load_default(36), fill="black")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return Record(number=0, id="a", body={"content": [{"type": "image"}]}, media=(buffer.getvalue(),))


def run(record: Record, **config: Any) -> Record | Drop:
    (outcome,) = scene_ocr([record], SceneOcrConfig(**config), CONTEXT)
    assert not isinstance(outcome, list)
    return outcome


def test_similarity_is_one_minus_the_edit_distance_per_character() -> None:
    assert similarity("", "") == similarity("abc", "abc") == 1
    assert similarity("abc", "") == 0
    assert similarity("kitten", "sitting") == pytest.approx(1 - 3 / 7)


def test_lines_that_both_engines_read_alike_are_kept_with_spaces_and_in_reading_order() -> None:
    first = [
        OcrLine("Secondline", (0, 40, 100, 60)),
        OcrLine("Firstline", (0, 0, 100, 20)),
        OcrLine("only one", (0, 80, 90, 99)),
    ]
    second = [
        OcrLine("First line", (2, 1, 98, 19)),
        OcrLine("second line", (1, 41, 97, 61)),
        OcrLine("else", (300, 0, 350, 20)),
    ]
    assert intersect(first, second, 1.0) == [
        OcrLine("First line", (0, 0, 100, 20)),
        OcrLine("Secondline", (0, 40, 100, 60)),
    ]


def test_lines_that_engines_divide_differently_are_compared_together() -> None:
    first = [OcrLine("one two", (0, 0, 200, 20))]
    second = [OcrLine("one", (0, 0, 90, 20)), OcrLine("two", (110, 0, 200, 20))]
    assert intersect(first, second, 1.0) == first
    assert intersect(second, first, 1.0) == second
    assert intersect(first, [second[0], OcrLine("ten", (110, 0, 200, 20))], 0.9) == []


def test_a_record_gets_the_agreed_text_and_the_share_that_was_agreed() -> None:
    one = answering(("same text", [0, 0, 100, 20]), ("differs", [0, 50, 100, 70]))
    two = answering(("same text", [0, 0, 100, 20]), ("otherwise", [0, 50, 100, 70]))
    kept = run(photo("x"), first=one, second=two, min_agreement=0.4)
    assert isinstance(kept, Record)
    assert kept.answers() == ["same text"]
    assert kept.facts == {"ocr_agreement": 0.4706, "ocr_lines": 1}  # 8 of 8 + 9 characters
    assert kept.body["ocr_lines"] == [{"text": "same text", "xyxy": [0, 0, 100, 20], "score": 1.0}]
    dropped = run(photo("x"), first=one, second=two)
    assert isinstance(dropped, Drop)
    assert (dropped.reason, dropped.value) == ("disagreement", 0.4706)


def test_lines_are_written_with_boxes() -> None:
    one = answering(("a", [0, 0, 100, 20]), ("b", [0, 50, 100, 70]))
    kept = run(photo("x"), first=one, second=answering(("A", [0, 0, 99, 20]), ("B", [0, 50, 99, 70])), form="lines")
    assert isinstance(kept, Record)
    assert kept.body["messages"][1]["content"] == [
        {"type": "box", "image": 0, "xyxy": [0, 0, 100, 20]},
        {"type": "text", "text": " a"},
        {"type": "text", "text": "\n"},
        {"type": "box", "image": 0, "xyxy": [0, 50, 100, 70]},
        {"type": "text", "text": " b"},
    ]


def test_images_without_text_are_dropped_and_existing_answers_kept_on_request() -> None:
    nothing, other = answering(), answering(("a", [0, 0, 9, 9]))
    dropped = run(photo("x"), first=nothing, second=CommandOcrConfig(command=(*nothing.command, "again")))
    assert isinstance(dropped, Drop)
    assert dropped.reason == "no_text"
    record = Record(number=0, id="a", body={"content": "known"}, media=photo("x").media)
    assert run(record, first=nothing, second=other, keep_answer=True) is record


def test_one_engine_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="second: is the same engine as first"):
        SceneOcrConfig(first=RapidOcrConfig(), second=RapidOcrConfig())


@pytest.mark.slow
@pytest.mark.skipif(
    "eng" not in tesseract_languages(), reason="the program tesseract with the language eng is not installed"
)
def test_rapidocr_and_tesseract_agree_on_printed_text() -> None:
    pytest.importorskip("rapidocr_onnxruntime")
    kept = run(photo("Harbour 2718", "north gate"))
    assert isinstance(kept, Record)
    assert kept.answers() == ["Harbour 2718\nnorth gate"]
    assert kept.facts["ocr_agreement"] == 1.0


@pytest.mark.slow
def test_two_configurations_of_rapidocr_agree_on_printed_text() -> None:
    pytest.importorskip("rapidocr_onnxruntime")
    kept = run(photo("Harbour 2718"), first=RapidOcrConfig(), second=RapidOcrConfig(box_threshold=0.7))
    assert isinstance(kept, Record)
    assert kept.answers()[0].replace(" ", "") == "Harbour2718"


def test_tesseract_is_a_second_engine_by_default() -> None:
    assert isinstance(SceneOcrConfig().second, TesseractConfig)
