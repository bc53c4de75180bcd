# SPDX-License-Identifier: Apache-2.0
"""Exact duplicates by content, on records whose equalities are known."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindvl_data.curation.duplicates.exact import STEP, ExactDuplicates
from mindvl_data.curation.record import Record

PIXELS = np.random.default_rng(0).integers(0, 255, (12, 16, 3), np.uint8)


def _encoded(pixels: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", **options)
    return buffer.getvalue()


PLAIN, COMPRESSED, OTHER = _encoded(PIXELS), _encoded(PIXELS, compress_level=0), _encoded(PIXELS[::-1])


def _records() -> list[Record]:
    contents = [
        ((PLAIN,), "A cat."),
        ((COMPRESSED,), "a   CAT."),
        ((OTHER,), "A cat."),
        ((PLAIN,), "A dog."),
        ((PLAIN,), "A cat."),
        ((PLAIN, OTHER), "A cat."),
        ((), "A cat."),
        ((), ""),
        ((), ""),
    ]
    return [
        Record(number=number, id=str(number), body={"content": text}, media=media)
        for number, (media, text) in enumerate(contents)
    ]


@pytest.mark.parametrize(
    ("content", "dropped"),
    [
        ("media", {3: 0, 4: 0}),
        ("pixels", {1: 0, 3: 0, 4: 0}),
        ("text", {1: 0, 2: 0, 4: 0, 5: 0, 6: 0}),
        ("media_and_text", {4: 0}),
        ("pixels_and_text", {1: 0, 4: 0}),
    ],
)
def test_records_with_the_same_content_are_dropped_but_one(content: Any, dropped: dict[int, int], decide: Any) -> None:
    found = decide(STEP, ExactDuplicates(content=content), _records())
    assert {number: d.drop.value for number, d in found.items() if d.drop} == {
        number: f"same as 0:{kept}" for number, kept in dropped.items()
    }
    assert found[0].facts == {"duplicate_group": "0:0", "num_duplicates": len(dropped)}
    assert len(found) == len(dropped) + 1


def test_the_greatest_fact_is_kept(decide: Any) -> None:
    records = [record.with_facts(pixels=record.number) for record in _records()]
    found = decide(STEP, ExactDuplicates(content="media", keep="pixels"), records)
    assert {number: d.drop.value for number, d in found.items() if d.drop} == {0: "same as 0:4", 3: "same as 0:4"}


def test_no_records_give_no_decisions(decide: Any) -> None:
    assert decide(STEP, ExactDuplicates(), []) == {}


def test_memory_must_be_positive() -> None:
    with pytest.raises(ValueError, match="memory_mib: must be at least 1, got 0"):
        ExactDuplicates(memory_mib=0)
