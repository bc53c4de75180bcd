# SPDX-License-Identifier: Apache-2.0
"""Records that others wrote."""

from typing import Any

import pytest

from mindvl_data import BadSample
from mindvl_data.formats.foreign import own_record, says_its_media

IMAGE = {"type": "image"}


def texts(*pairs: tuple[str, list[Any]]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


ASKED = texts(("user", [IMAGE, {"type": "text", "text": "Which?"}]), ("assistant", [{"type": "text", "text": "red"}]))


@pytest.mark.parametrize(
    "record",
    [
        [{"from": "human", "value": "<image>Which?"}, {"from": "gpt", "value": "red"}],
        {"conversations": [{"from": "user", "value": "<image>Which?"}, {"from": "gpt", "value": "red"}], "id": 3},
        {"conversations": [{"role": "user", "content": "<image>Which?"}, {"role": "assistant", "content": "red"}]},
        {"texts": [{"user": "Which?", "assistant": "red", "source": "x"}]},
        {"question": "Which?", "answer": "red", "caption": "not used"},
        {"context": "Which?", "answers": ["red", "blue"], "answer_weights": [1, 0]},
    ],
)
def test_every_shape_of_a_question_about_a_picture_means_the_same(record: Any) -> None:
    assert own_record(record, ["image"]) == ASKED


def test_captions_follow_their_pictures() -> None:
    shown = {"content": [IMAGE, {"type": "video"}, "a cat"], "max_pixels": 9000}
    assert own_record({"caption": "a cat", "url": "u", "max_pixels": 9000}, ["image", "video"]) == shown
    assert own_record({"captions": ["a cat", "a pet"]}, []) == {"content": ["a cat"]}


def test_our_own_records_and_unknown_ones_stay_as_they_are() -> None:
    for record in ({"content": "x", "text": "y"}, {"url": "u"}, {"text": ""}, 5, None, {"messages": 5}, ASKED):
        assert own_record(record, ["image"]) == record


def test_marks_in_messages_count_only_where_they_are_the_pictures() -> None:
    def said(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "red"}]}

    marked = own_record(said("<image>Which?"), ["image"])
    assert marked["messages"][0]["content"] == [IMAGE, {"type": "text", "text": "Which?"}]
    for media in ([], ["image", "image"]):
        assert own_record(said("<image>Which?"), media) == said("<image>Which?")
    mixed = texts(("user", [IMAGE, {"type": "text", "text": "what does <image> mean?"}]))
    assert own_record(mixed, ["image"]) == mixed


def test_parts_of_other_apis_become_ours() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "?", "index": None}]
    assert own_record(texts(("user", parts)), ["image"]) == texts(("user", [IMAGE, {"type": "text", "text": "?"}]))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([{"from": "bot", "value": "x"}], "turn 0 is from 'bot'"),
        ([5], "turn 0 is from None"),
        ({"conversations": "x"}, "str instead of a list"),
        ({"conversations": [{"from": ["x"], "value": "x"}]}, "turn 0"),
        ({"conversations": [{"from": "gpt", "value": "<box:0>"}]}, "`boxes` does not hold"),
        ({"texts": [{"user": "x"}]}, "`texts` 0"),
        ({"texts": {}}, "dict instead of a list"),
    ],
)
def test_a_known_shape_that_holds_something_else_is_a_bad_sample(record: Any, message: str) -> None:
    with pytest.raises(BadSample, match=message):
        own_record(record, [])


def test_conversations_tell_how_many_pictures_they_have_and_captions_do_not() -> None:
    assert says_its_media([])
    assert says_its_media({"messages": []})
    assert not says_its_media({"caption": "a"})
    assert not says_its_media({"question": "a", "answer": "b"})
