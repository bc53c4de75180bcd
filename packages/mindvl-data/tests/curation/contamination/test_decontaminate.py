# SPDX-License-Identifier: Apache-2.0
"""Contaminated records are dropped, and both sides of a match are listed."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindvl_data.curation.contamination.decontaminate import STEP, Decontaminate, prepare
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context
from mindvl_data.errors import DataError

LONG = "In which year did the old lighthouse on the northern cliff lose its lamp in a storm"
SHORT = "What is shown in the image?"
CHINESE = "\u8bf7\u6839\u636e\u56fe\u4e2d\u7684\u6d77\u62a5\u56de\u7b54\u6f14\u51fa\u5f00\u59cb\u7684\u65f6\u95f4"


def _photo(seed: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 255, (6, 6, 3), np.uint8)
    return Image.fromarray(coarse).resize((96, 96), Image.Resampling.BICUBIC)


def _encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture
def benchmark(tmp_path: Path) -> Path:
    (tmp_path / "one.png").write_bytes(_encoded(_photo(1)))
    rows = [
        {"id": "a", "question": f"{LONG}?", "answer": "1931"},
        {"id": "b", "question": SHORT, "answer": "cat", "image": "one.png"},
        {"id": "c", "question": CHINESE, "answer": "8"},
    ]
    path = tmp_path / "bench.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def _records() -> list[Record]:
    contents = [
        (f"He asked: IN WHICH YEAR did the old light-house? {LONG.upper()}, and why?", ()),
        (SHORT, (_photo(2),)),
        ("A photo.", (_photo(3), _photo(1).resize((60, 80)))),
        (" ".join(LONG.split()[:12]), ()),
        (CHINESE, ()),
        (f"{LONG} {SHORT}", (_photo(1),)),
    ]
    return [
        Record(number=number, id=f"web:{number}", body={"content": text}, media=tuple(map(_encoded, images)))
        for number, (text, images) in enumerate(contents)
    ]


def test_long_runs_and_images_match_and_short_questions_do_not(benchmark: Path, decide: Any, context: Context) -> None:
    config = Decontaminate(benchmarks=(benchmark,))
    prepare(config, context)
    found = decide(STEP, config, _records())
    assert {number: d.drop.reason for number, d in found.items()} == {
        0: "contaminated_text",
        2: "contaminated_image",
        4: "contaminated_text",
        5: "contaminated_text",
    }
    assert found[2].drop.value == f"image 1, 0 different bits: {benchmark} row 2 (id b)"
    (listing,) = context.cache.glob("contamination-*.jsonl")
    lines = [json.loads(line) for line in listing.read_text(encoding="utf-8").splitlines()]
    assert [(line["record"], line["reason"]) for line in lines] == [
        ("web:0", "contaminated_text"),
        ("web:2", "contaminated_image"),
        ("web:4", "contaminated_text"),
        ("web:5", "contaminated_text"),
        ("web:5", "contaminated_image"),
    ]
    assert lines[0]["benchmark"] == f"{benchmark} row 1 (id a)"
    assert lines[0]["benchmark_text"] == f"{LONG}?"
    # 17 words give 5 runs of 13; the first is quoted
    first = " ".join(LONG.lower().split()[:13])
    assert lines[0]["match"] == f"5 equal runs, first {first!r}"
    assert " ".join(CHINESE[:13]) in lines[2]["match"]


def test_only_texts_or_only_images_may_be_compared(benchmark: Path, decide: Any, context: Context) -> None:
    for match, numbers in (("text", {0, 4, 5}), ("images", {2, 5})):
        config = Decontaminate(benchmarks=(benchmark,), match=match)  # type: ignore[arg-type]
        prepare(config, context)
        assert set(decide(STEP, config, _records())) == numbers


def test_a_changed_benchmark_is_read_again(benchmark: Path, decide: Any, context: Context) -> None:
    config = Decontaminate(benchmarks=(benchmark,))
    prepare(config, context)
    benchmark.write_text(json.dumps({"question": "Something else entirely"}))
    prepare(config, context)
    assert decide(STEP, config, _records()) == {}
    assert len(list(context.cache.glob("contamination-*.npz"))) == 2


def test_a_missing_benchmark_is_refused(tmp_path: Path, context: Context) -> None:
    with pytest.raises(DataError, match=r"none\.tsv does not exist"):
        prepare(Decontaminate(benchmarks=(tmp_path / "none.tsv",)), context)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"benchmarks": ()}, "benchmarks: must name"), ({"num_tokens": 0}, "num_tokens: "), ({"radius": 99}, "radius: ")],
)
def test_parameters_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Decontaminate(**{"benchmarks": (Path("a.tsv"),), **fields})
