# SPDX-License-Identifier: Apache-2.0
"""Records that others wrote."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindvl_data import SampleError
from mindvl_data.formats.foreign import states_its_media, to_record
from mindvl_data.samples import parse_sample
from mindvl_data.types import MediaSize, RawSample

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
def test_every_shape_of_a_question_about_an_image_means_the_same(record: Any) -> None:
    assert to_record(record, ["image"]) == ASKED


def test_captions_follow_their_images() -> None:
    shown = {"content": [IMAGE, {"type": "video"}, "a cat"], "max_pixels": 9000}
    assert to_record({"caption": "a cat", "url": "u", "max_pixels": 9000}, ["image", "video"]) == shown
    assert to_record({"captions": ["a cat", "a pet"]}, []) == {"content": ["a cat"]}


def test_our_to_records_and_unknown_ones_stay_as_they_are() -> None:
    for record in ({"content": "x", "text": "y"}, {"url": "u"}, {"text": ""}, 5, None, {"messages": 5}, ASKED):
        assert to_record(record, ["image"]) == record


def test_placeholders_in_messages_count_only_where_they_are_the_images() -> None:
    def turn_of(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "red"}]}

    marked = to_record(turn_of("<image>Which?"), ["image"])
    assert marked["messages"][0]["content"] == [IMAGE, {"type": "text", "text": "Which?"}]
    for media in ([], ["image", "image"]):
        assert to_record(turn_of("<image>Which?"), media) == turn_of("<image>Which?")
    mixed = texts(("user", [IMAGE, {"type": "text", "text": "what does <image> mean?"}]))
    assert to_record(mixed, ["image"]) == mixed


def test_parts_of_other_apis_become_ours() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "?", "index": None}]
    assert to_record(texts(("user", parts)), ["image"]) == texts(("user", [IMAGE, {"type": "text", "text": "?"}]))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([{"from": "bot", "value": "x"}], "turn 0 must have .*'bot'"),
        ([5], "turn 0 must have .*None"),
        ({"conversations": "x"}, "must be a list of turns, got str"),
        ({"conversations": [{"from": ["x"], "value": "x"}]}, "turn 0"),
        ({"conversations": [{"from": "gpt", "value": "<box:0>"}]}, "`boxes` has no entry"),
        ({"texts": [{"user": "x"}]}, "entry 0 of `texts`"),
        ({"texts": {}}, "must be a list, got dict"),
    ],
)
def test_a_known_shape_that_holds_something_else_is_a_bad_sample(record: Any, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        to_record(record, [])


def test_conversations_tell_how_many_images_they_have_and_captions_do_not() -> None:
    assert states_its_media([])
    assert states_its_media({"messages": []})
    assert not states_its_media({"caption": "a"})
    assert not states_its_media({"question": "a", "answer": "b"})


SHAPES = (
    "messages",
    "content",
    "conversations",
    "texts",
    "question",
    "answers",
    "caption",
    "boxes",
    "min_pixels",
    "tools",
)
INSIDE = (
    "role",
    "from",
    "value",
    "type",
    "text",
    "image",
    "xyxy",
    "user",
    "assistant",
    "reasoning_content",
    "tool_calls",
)
NAMES = st.sampled_from([*SHAPES, *INSIDE])
WORDS = st.sampled_from(
    ["user", "gpt", "assistant", "image", "video", "box", "text", "<image>a", "<box:0>", "\ud800", ""]
)
LEAVES = st.one_of(WORDS, st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=4)),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(record=st.one_of(st.dictionaries(NAMES, VALUES, max_size=4), VALUES), num_media=st.integers(0, 2))
def test_whatever_a_record_holds_it_is_a_sample_or_a_bad_one(record: Any, num_media: int) -> None:
    content = json.dumps(record).encode()
    sizes = (MediaSize(1, 1), MediaSize(1, 1, 2, 1.0))[:num_media]
    raw = RawSample(key="", record=content, is_json=True, media=(b"",) * num_media, sizes=sizes)
    with suppress(SampleError):
        sample = parse_sample(raw)
        assert sample.num_images + sample.num_videos == num_media
        assert bool(sample.messages) != bool(sample.content)


def test_a_number_that_python_refuses_to_read_is_text() -> None:
    turns = [{"from": "human", "value": f"<box:{'1' * 5000}>"}, {"from": "gpt", "value": "!"}]
    assert len(to_record(turns, [])["messages"][0]["content"]) == 1


def test_conversations_keep_their_tools_and_reasoning() -> None:
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "a", "reasoning_content": "hm"}]
    record = to_record({"conversations": turns, "tools": "[]", "min_pixels": 784}, [])
    assert record["messages"][1]["reasoning_content"] == "hm"
    assert (record["tools"], record["min_pixels"]) == ("[]", 784)
