# SPDX-License-Identifier: Apache-2.0
"""Engines that read text: two real ones, a command, and the forms of their answers."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from mindvl_data.curation.endpoint import EndpointConfig
from mindvl_data.curation.ocr_engines import (
    CommandOcrConfig,
    EndpointOcrConfig,
    EngineConfig,
    OcrLine,
    RapidOcrConfig,
    TesseractConfig,
    check_engine,
    engine_of,
    lines_from_json,
    lines_from_tsv,
    tesseract_languages,
)
from mindvl_data.curation.step import Context
from mindvl_data.errors import DataError, SampleError

needs_tesseract = pytest.mark.skipif(
    "eng" not in tesseract_languages(), reason="the program tesseract with the language eng is not installed"
)
ECHO = """
import base64, io, json, sys, time
from PIL import Image
for line in sys.stdin:
    request = json.loads(line)
    image = Image.open(io.BytesIO(base64.b64decode(request["image"])))
    value = image.getpixel((0, 0))[0]
    if value == 1: print("not json", flush=True)
    elif value == 2: print(json.dumps({"error": "no"}), flush=True)
    elif value == 3: time.sleep(60)
    elif value == 4: sys.exit(1)
    else: print(json.dumps({"lines": [{"text": f" {value} ", "box": [-1, 0, *image.size]}]}), flush=True)
"""


def photo(text: str, size: tuple[int, int] = (520, 90)) -> NDArray[np.uint8]:
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).text((20, 25), text, font=ImageFont.load_default(36), fill="black")
    return np.array(image)


def gray(value: int) -> NDArray[np.uint8]:
    return np.full((20, 30, 3), value, np.uint8)


def read(config: EngineConfig, image: NDArray[np.uint8]) -> list[OcrLine]:
    return engine_of(config, Context(seed=0, cache=Path("unused"))).read(image)


@pytest.mark.slow
def test_rapidocr_reads_a_line_and_finds_its_box() -> None:
    pytest.importorskip("rapidocr_onnxruntime")
    (line,) = read(RapidOcrConfig(), photo("Harbour 2718"))
    assert line.text.replace(" ", "") == "Harbour2718"
    x1, y1, x2, y2 = line.xyxy
    assert 10 <= x1 <= 25
    assert 15 <= y1 <= 40 < y2 <= 80
    assert x2 - x1 > 150
    assert read(RapidOcrConfig(), gray(255)) == []


@needs_tesseract
def test_tesseract_reads_a_line_and_finds_its_box() -> None:
    (line,) = read(TesseractConfig(), photo("Harbour 2718"))
    assert line.text == "Harbour 2718"
    assert 10 <= line.xyxy[0] <= 25
    assert line.score > 0.5
    assert read(TesseractConfig(), gray(255)) == []


def test_a_missing_language_of_tesseract_is_an_error_before_the_run() -> None:
    with pytest.raises(DataError, match="the languages xyz are not installed"):
        check_engine(TesseractConfig(languages="xyz"))


def test_words_of_tesseract_are_joined_to_lines_and_unsure_words_left_out() -> None:
    rows = [
        "level\tpage\tblock\tpar\tline\tword\tleft\ttop\twidth\theight\tconf\ttext",
        "4\t1\t1\t1\t1\t0\t10\t20\t90\t12\t-1\t",
        "5\t1\t1\t1\t1\t1\t10\t20\t40\t10\t90.0\tone",
        "5\t1\t1\t1\t1\t2\t60\t22\t40\t10\t80.0\ttwo",
        "5\t1\t1\t1\t1\t3\t110\t22\t40\t10\t30.0\tunsure",
        "5\t1\t1\t1\t2\t1\t10\t50\t40\t10\t70.0\tbelow",
    ]
    assert lines_from_tsv("\n".join(rows), 0.5) == [
        OcrLine("one two", (10, 20, 100, 32), 0.85),
        OcrLine("below", (10, 50, 50, 60), 0.7),
    ]


def test_a_command_is_asked_line_by_line_and_survives_images_that_make_it_fail() -> None:
    config = CommandOcrConfig(command=(sys.executable, "-c", ECHO), timeout_s=120)
    engine = engine_of(config, Context(seed=0, cache=Path("unused")))
    expected = [OcrLine("9", (0, 0, 30, 20))]
    assert engine.read(gray(9)) == expected
    for value, message in [(1, "failed"), (2, "reports: 'no'"), (4, "it ended")]:
        with pytest.raises(SampleError, match=message):
            engine.read(gray(value))
        assert engine.read(gray(9)) == expected


def test_a_command_that_is_silent_for_too_long_is_stopped() -> None:
    config = CommandOcrConfig(command=(sys.executable, "-c", ECHO), timeout_s=1)
    with pytest.raises(SampleError, match="no answer after 1 seconds"):
        read(config, gray(3))


def test_an_endpoint_is_asked_for_lines_with_boxes_from_0_to_1000(chat_server: Any, tmp_path: Path) -> None:
    chat_server.answer = lambda body: 'Here: [{"text": "Harbour", "box": [100, 500, 600, 1000]}]'
    config = EndpointOcrConfig(endpoint=EndpointConfig(url=chat_server.url, model="m"))
    check_engine(config)
    engine = engine_of(config, Context(seed=0, cache=tmp_path))
    assert engine.read(gray(9)) == [OcrLine("Harbour", (3, 10, 18, 20))]  # the image has 30 x 20 pixels
    chat_server.answer = lambda body: "I cannot read this."
    with pytest.raises(SampleError, match="did not answer with a JSON list"):
        engine.read(gray(8))


def test_answers_of_another_form_are_refused() -> None:
    with pytest.raises(SampleError, match="without text or box"):
        lines_from_json([{"text": "a"}], 10, 10)
    with pytest.raises(SampleError, match="a list of at most"):
        lines_from_json({"lines": []}, 10, 10)
    assert lines_from_json([{"text": "a", "box": [20, 20, 30, 30]}], 10, 10) == []  # outside of the image


def test_a_program_that_does_not_exist_is_an_error_before_the_run() -> None:
    with pytest.raises(DataError, match="is not a program"):
        check_engine(CommandOcrConfig(command=("no-such-program",)))
