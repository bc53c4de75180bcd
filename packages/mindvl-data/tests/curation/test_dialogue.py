# SPDX-License-Identifier: Apache-2.0
"""Questions and answers of records."""

import pytest

from mindvl_data.curation.dialogue import answer, language_of, question_key, turns, with_answer
from mindvl_data.curation.record import Record
from mindvl_data.errors import SampleError

CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, "Where is ", {"type": "point", "xy": [3, 4]}, "?"]},
        {"role": "assistant", "content": "At the door.", "reasoning_content": "The door is near."},
    ]
}
PAIR = {"content": [{"type": "image"}, {"type": "text", "text": "A cat."}]}


def _record(body: dict, *media: bytes) -> Record:
    return Record(number=0, id="r", body=body, media=media)


def test_messages_are_shown_with_images_and_coordinates_in_place() -> None:
    assert turns(_record(CHAT, b"image")) == [
        ("system", ["Be brief."]),
        ("user", [b"image", "Where is ", "[3, 4]", "?"]),
        ("assistant", ["At the door."]),
    ]
    assert turns(_record(PAIR, b"image")) == [("document", [b"image", "A cat."])]


@pytest.mark.parametrize(
    ("body", "media", "reason"),
    [
        (PAIR, (), "more images than the record has"),
        (PAIR, (b"a", b"b"), "has 2 media"),
        ({"content": [{"type": "video"}]}, (b"v",), "'video' cannot be shown"),
    ],
)
def test_what_cannot_be_shown_is_a_failed_record(body: dict, media: tuple[bytes, ...], reason: str) -> None:
    with pytest.raises(SampleError, match=reason):
        turns(_record(body, *media))


def test_an_answer_is_replaced_without_its_reasoning_and_the_record_is_not_modified() -> None:
    record = _record(CHAT, b"image")
    changed = with_answer(record, "On the left.")
    assert (answer(record), answer(changed)) == ("At the door.", "On the left.")
    assert changed.body["messages"][-1] == {"role": "assistant", "content": "On the left."}
    pair = with_answer(_record(PAIR, b"image"), "A dog.")
    assert pair.body == {"content": [{"type": "image"}, {"type": "text", "text": "A dog."}]}
    assert answer(with_answer(_record({"content": "x"}), "y")) == "y"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"content": ["one", {"type": "image"}, "two"]}, "2 texts and no messages"),
        ({"messages": [{"role": "user", "content": "x"}]}, "not one of the assistant"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "calls a tool"),
        ({"messages": [{"role": "assistant", "content": [{"type": "box", "xyxy": [1, 2, 3, 4]}]}]}, "points, boxes"),
        ({}, "no answer"),
    ],
)
def test_what_has_no_single_text_as_answer_is_a_failed_record(body: dict, reason: str) -> None:
    with pytest.raises(SampleError, match=reason):
        answer(_record(body))


def test_a_question_is_known_by_its_content_whatever_the_answer() -> None:
    key = question_key(_record(CHAT, b"image"))
    assert key == question_key(with_answer(_record(CHAT, b"image"), "other"))
    assert key != question_key(_record(CHAT, b"other"))
    asked = {"messages": [{"role": "user", "content": "Why?"}, CHAT["messages"][-1]]}
    assert key != question_key(_record(asked))


def test_the_language_is_that_of_the_record_or_a_fixed_one() -> None:
    record = _record(PAIR)
    assert language_of(record, "record") == "en"
    assert language_of(record.with_facts(language="zh"), "record") == "zh"
    assert language_of(record.with_facts(language="zh"), "en") == "en"
    assert language_of(record.with_facts(language="fr"), "record") == "en"
