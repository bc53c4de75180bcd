# SPDX-License-Identifier: Apache-2.0
"""Samples: which records are valid, and the errors for all others."""

import json
from typing import Any

import pytest

from mindvl_data import SampleError
from mindvl_data.samples import cut_turns, num_turns, parse_record, parse_sample
from mindvl_data.types import Coordinates, Image, MediaSize, RawSample, Sample, Text, Video


def chat(content: Any, answer: Any = "yes", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}], **more}


def test_images_are_numbered_over_the_whole_conversation() -> None:
    image = {"type": "image"}
    record = chat([image, "or", image])
    record["messages"].append({"role": "user", "content": [image, {"type": "text", "text": "and this?"}]})
    sample = parse_record(record, num_images=3)
    assert sample.messages[0].parts == (Image(0), Text("or"), Image(1))
    assert sample.messages[2].parts == (Image(2), Text("and this?"))
    assert not sample.has_coordinates


def test_coordinates_refer_to_an_image() -> None:
    sample = parse_record(
        chat([{"type": "image"}], [{"type": "box", "image": 0, "xyxy": [1, 2, 3, 4.5]}]), num_images=1
    )
    assert sample.messages[1].parts == (Coordinates(0, (1.0, 2.0, 3.0, 4.5)),)
    assert sample.has_coordinates


def test_a_plain_text_record_shows_its_images_first() -> None:
    sample = parse_sample(RawSample(key="a", record=b"a cat", is_json=False, media=(b"",), sizes=(MediaSize(1, 1),)))
    assert sample.content == (Image(0), Text("a cat"))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "either `messages` or `content`"),
        ({"messages": [], "content": ""}, "either `messages` or `content`"),
        ({"content": ""}, "no text to train on"),
        ({"messages": "hi"}, "must be a list of at least one message"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no assistant message to train on"),
        ({"messages": [{"role": "human", "content": "a"}]}, "message 0: role must be one of .*, got 'human'"),
        ({"messages": ["a"]}, "role must be .*, got 'None'"),
        (chat("a", ""), "assistant is empty"),
        (chat("a", []), "assistant is empty"),
        (chat("a", [{"type": "image"}]), "of the assistant contains an image"),
        (chat(3), "content must be a string or a list of parts, got int"),
        (chat([{"type": "audio"}]), "part type must be .*, got 'audio'"),
        (chat([{"type": "text", "text": 5}]), "text must be a string, got int"),
        (chat("\ud800"), "lone surrogate"),
        (chat([{"type": "image"}]), "mentions 1 images, but the sample has 0"),
        (chat("a", [{"type": "point", "xy": [1, 2]}]), "refer to image 0"),
        (chat("a", [{"type": "point", "xy": [1]}]), "2 finite coordinates"),
        (chat("a", [{"type": "box", "xyxy": [1, 2, 3, float("nan")]}]), "4 finite coordinates"),
        (chat("a", [{"type": "point", "image": True, "xy": [1, 2]}]), "must have an image number"),
        (chat("a", " \n"), "assistant is empty"),
        (chat("a", [{"type": "video"}]), "of the assistant contains an image"),
        (chat([{"type": "video"}]), "mentions 1 videos, but the sample has 0"),
        (chat("a", "\udfff"), "lone surrogate"),
        (chat("a", min_pixels=783), "min_pixels must be an integer from 784"),
        (chat("a", max_pixels=True), "max_pixels must be .*, got 'True'"),
        (chat("a", max_pixels="1000"), "max_pixels must be .*, got '1000'"),
        (chat("a", max_pixels=1 << 31), "to 2147483647, got '2147483648'"),
        (chat("a", max_pixels=1e6), "got '1000000.0'"),
        (chat("a", min_pixels=2000, max_pixels=1000), "min_pixels=2000 is greater than max_pixels=1000"),
        ({"messages": [{"role": ["user"] * 1000, "content": "a"}]}, r"got \"\['user', 'user'"),
        ({"content": [" ", "\n"]}, "no text to train on"),
    ],
)
def test_a_record_that_does_not_fit_is_a_bad_sample(record: Any, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        parse_record(record, num_images=0)


def raw(record: bytes, *sizes: MediaSize, is_json: bool = True) -> RawSample:
    return RawSample(key="a", record=record, is_json=is_json, media=(b"",) * len(sizes), sizes=sizes)


@pytest.mark.parametrize(
    "record", [b"[" * 100_000, b'{"a":' * 100_000, b"", b"{", b'{"messages": [}', b"\xff\xfe", b"1" * 5000, b"nul"]
)
def test_json_that_is_broken_or_nested_too_deep_is_a_bad_sample(record: bytes) -> None:
    with pytest.raises(SampleError, match="cannot be read"):
        parse_sample(raw(record))


def test_a_text_of_ten_megabytes_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.dumps(chat("a" * 10_000_000)).encode()
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("the text was read"))
    with pytest.raises(SampleError, match=r"record has 10000\d+ bytes, more than the limit of 8000000"):
        parse_sample(raw(record))


def test_images_and_videos_are_numbered_together_and_have_to_be_what_the_text_says() -> None:
    image, video = {"type": "image"}, {"type": "video"}
    point = {"type": "point", "image": 1, "xy": [1, 2]}
    record = json.dumps(chat([image, video, image, "?"], [point], min_pixels=784)).encode()
    photo, film = MediaSize(10, 10), MediaSize(10, 10, 30, 10.0)
    sample = parse_sample(raw(record, photo, film, photo))
    assert sample.messages[0].parts[:3] == (Image(0), Video(1), Image(2))
    assert sample.messages[1].parts == (Coordinates(1, (1.0, 2.0)),)  # the second photo
    assert (sample.num_images, sample.num_videos, sample.min_pixels, sample.max_pixels) == (2, 1, 784, None)
    with pytest.raises(SampleError, match="mentions a video, but medium 1 is an image"):
        parse_sample(raw(record, photo, photo, film))
    plain = parse_sample(raw(b"a cat", film, photo, is_json=False))
    assert plain.content == (Video(0), Image(1), Text("a cat"))


def turns(*roles: str) -> Sample:
    messages = [{"role": role, "content": str(number)} for number, role in enumerate(roles)]
    return parse_record({"messages": messages}, num_images=0)


def test_a_turn_is_a_question_and_all_that_follows_it() -> None:
    sample = turns("system", "user", "assistant", "tool", "assistant", "user", "assistant", "user")
    assert num_turns(sample) == 3
    assert [len(cut_turns(sample, keep).messages) for keep in (1, 2, 3)] == [5, 7, 8]
    with pytest.raises(SampleError, match="first 1 of 2 turns contain no assistant message"):
        cut_turns(turns("user", "user", "assistant"), 1)
    assert num_turns(parse_record({"content": "a"}, num_images=0)) == 0


def test_media_and_coordinates_of_turns_that_were_cut_are_gone() -> None:
    image = {"type": "image"}
    record = chat([image, "a"], [{"type": "point", "image": 1, "xy": [1, 2]}])
    record["messages"] += chat([image, "b"])["messages"]
    sample = parse_record(record, num_images=2)
    with pytest.raises(SampleError, match="coordinates of an image of a later turn"):
        cut_turns(sample, 1)
    record["messages"][1]["content"] = "no point"
    kept = cut_turns(parse_record(record, num_images=2), 1)
    assert (kept.num_images, kept.has_coordinates, len(kept.messages)) == (1, False, 2)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


def test_tools_reasoning_and_calls_are_kept() -> None:
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4", "tool_calls": None, "reasoning_content": None},
    ]
    for tools in ([CALL], json.dumps([CALL])):
        sample = parse_record({"messages": messages, "tools": tools}, num_images=0)
        assert sample.tools == (CALL,)
        assert [message.reasoning for message in sample.messages] == ["", "hm", "", ""]
        assert [message.tool_calls for message in sample.messages] == [(), (CALL,), (), ()]
        assert cut_turns(sample, 1).tools == (CALL,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tools": {"name": "add"}}, "`tools` must be a list of objects, got dict"),
        ({"tools": ["add"]}, "`tools` must be a list of objects, got list"),
        ({"tools": "[{"}, "`tools` is not valid JSON"),
        ({"tools": [{"name": "\ud800"}]}, "`tools` cannot be encoded"),
        ({"tools": [{"name": float("nan")}]}, "`tools` cannot be encoded"),
        ({"reasoning_content": 3}, "text must be a string, got int"),
        ({"tool_calls": 3}, "`tool_calls` of message 1 must be a list of objects, got int"),
    ],
)
def test_tools_and_reasoning_of_another_kind_are_bad(change: dict[str, Any], message: str) -> None:
    record = chat("?")
    (record if "tools" in change else record["messages"][1]).update(change)
    with pytest.raises(SampleError, match=message):
        parse_record(record, num_images=0)


@pytest.mark.parametrize("field", ["reasoning_content", "tool_calls"])
def test_only_the_assistant_reasons_and_calls(field: str) -> None:
    record = chat("?")
    record["messages"][0][field] = "x" if field == "reasoning_content" else [CALL]
    with pytest.raises(SampleError, match="message 0 has role user, but only assistant messages may have"):
        parse_record(record, num_images=0)
