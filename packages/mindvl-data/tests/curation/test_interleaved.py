# SPDX-License-Identifier: Apache-2.0
"""Relevance of images in interleaved records; the scorer is replaced by one that knows the similarity of each pair."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mindvl_data.curation.interleaved import (
    InterleavedRelevance,
    interleaved_relevance,
    neighbours,
    without_images,
)
from mindvl_data.curation.record import Record
from mindvl_data.curation.scorers import Item
from mindvl_data.curation.step import Context, Drop
from mindvl_data.errors import SampleError

IMAGE = {"type": "image"}


class _Scorer:
    """The similarity of (first byte of the image, text); the number of items of each call is kept."""

    def __init__(self, similarities: dict[tuple[bytes, str], float]) -> None:
        self.similarities = similarities
        self.calls: list[int] = []

    def score(self, items: Sequence[Item]) -> list[float]:
        self.calls.append(len(items))
        return [self.similarities[item.record.media[item.index], item.text] for item in items]


def _record(content: list[Any], *media: bytes, number: int = 0) -> Record:
    return Record(number=number, id=str(number), body={"content": content}, media=media)


def _run(
    context: Context, records: list[Record], similarities: dict[tuple[bytes, str], float], **fields: Any
) -> tuple[Any, _Scorer]:
    config = InterleavedRelevance(model=Path("clip"), min_similarity=0.2, **fields)
    scorer = _Scorer(similarities)
    context.resources["clip", config.model, config.device, config.batch_size] = scorer
    return interleaved_relevance(records, config, context), scorer


def test_an_image_is_compared_with_the_end_of_the_text_before_and_the_beginning_of_the_text_after() -> None:
    long = "start " + "x" * 400 + " end"
    record = _record([long, IMAGE, " ", IMAGE, {"type": "text", "text": long}], b"a", b"b")
    before, after = "x" * 296 + " end", "start " + "x" * 294
    assert neighbours(record) == [[before, after], [before, after]]
    assert neighbours(_record([IMAGE, "after"], b"a")) == [["after"]]
    assert neighbours(_record([IMAGE], b"a")) == [[]]


def test_an_irrelevant_image_is_removed_and_the_best_neighbour_counts(context: Context) -> None:
    record = _record(["one", IMAGE, "two", IMAGE, "three"], b"a", b"b")
    similarities = {(b"a", "one"): 0.1, (b"a", "two"): 0.3, (b"b", "two"): 0.19, (b"b", "three"): 0.1}
    (changed,), _ = _run(context, [record], similarities)
    assert changed.body["content"] == ["one", IMAGE, "two", "three"]
    assert changed.media == (b"a",)
    assert changed.facts == {"image_relevance": [0.3, 0.19], "lowest_relevance": 0.19, "images_removed": 1}


def test_a_record_is_dropped_if_no_image_is_relevant_or_removing_is_not_wanted(context: Context) -> None:
    records = [_record(["one", IMAGE], b"a"), _record(["one", IMAGE, "two", IMAGE], b"a", b"b", number=1)]
    similarities = {(b"a", "one"): 0.1, (b"a", "two"): 0.1, (b"b", "two"): 0.5}
    (first, second), scorer = _run(context, records, similarities)
    assert isinstance(first, Drop)
    assert (first.reason, first.value) == ("irrelevant_image", 0.1)
    assert second.media == (b"b",)
    assert scorer.calls == [4]  # one call for the batch
    (_, dropped), _ = _run(context, records, similarities, irrelevant="drop")
    assert isinstance(dropped, Drop)


def test_a_conversation_with_an_irrelevant_image_is_dropped(context: Context) -> None:
    messages = [{"role": "user", "content": [IMAGE, IMAGE, "why"]}, {"role": "assistant", "content": "so"}]
    record = Record(number=0, id="0", body={"messages": messages}, media=(b"a", b"b"))
    (outcome,), _ = _run(context, [record], {(b"a", "why"): 0.9, (b"b", "why"): 0.1})
    assert isinstance(outcome, Drop)


def test_records_without_images_or_texts_pass(context: Context) -> None:
    records = [_record(["only text"]), _record([IMAGE], b"a", number=1)]
    outcomes, scorer = _run(context, records, {})
    assert outcomes == records
    assert scorer.calls == []


def test_an_image_is_not_removed_from_a_record_with_boxes() -> None:
    record = _record([IMAGE, {"type": "box", "image": 0, "xyxy": [1, 2, 3, 4]}], b"a")
    with pytest.raises(SampleError, match="with a box"):
        without_images(record, {0})
