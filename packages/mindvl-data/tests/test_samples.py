# SPDX-License-Identifier: Apache-2.0
"""Samples: what a record may say, and what it is told when it says something else."""

from typing import Any

import pytest

from mindvl_data import BadSample
from mindvl_data.samples import parse_record, parse_sample
from mindvl_data.types import Coordinates, Image, MediaSize, RawSample, Text


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


def test_coordinates_refer_to_a_picture() -> None:
    sample = parse_record(
        chat([{"type": "image"}], [{"type": "box", "image": 0, "xyxy": [1, 2, 3, 4.5]}]), num_images=1
    )
    assert sample.messages[1].parts == (Coordinates(0, (1.0, 2.0, 3.0, 4.5)),)
    assert sample.has_coordinates


def test_a_plain_text_record_shows_its_pictures_first() -> None:
    sample = parse_sample(RawSample(key="a", record=b"a cat", is_json=False, media=(b"",), sizes=(MediaSize(1, 1),)))
    assert sample.content == (Image(0), Text("a cat"))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "either `messages` or `content`"),
        ({"messages": [], "content": ""}, "either `messages` or `content`"),
        ({"content": ""}, "no text to learn"),
        ({"messages": "hi"}, "not a list"),
        ({"messages": [{"role": "user", "content": "a"}]}, "nothing to learn"),
        ({"messages": [{"role": "human", "content": "a"}]}, "role 'human'"),
        ({"messages": ["a"]}, "role 'None'"),
        (chat("a", ""), "assistant is empty"),
        (chat("a", []), "assistant is empty"),
        (chat("a", [{"type": "image"}]), "can only be shown"),
        (chat(3), "content is int"),
        (chat([{"type": "audio"}]), "type 'audio'"),
        (chat([{"type": "text", "text": 5}]), "text is int"),
        (chat("\ud800"), "lone surrogate"),
        (chat([{"type": "image"}]), "mentions 1 images, the sample has 0"),
        (chat("a", [{"type": "point", "xy": [1, 2]}]), "refer to image 0"),
        (chat("a", [{"type": "point", "xy": [1]}]), "2 finite coordinates"),
        (chat("a", [{"type": "box", "xyxy": [1, 2, 3, float("nan")]}]), "4 finite coordinates"),
    ],
)
def test_a_record_that_does_not_fit_is_a_bad_sample(record: Any, message: str) -> None:
    with pytest.raises(BadSample, match=message):
        parse_record(record, num_images=0)


def test_deeply_nested_json_is_a_bad_sample() -> None:
    with pytest.raises(BadSample, match="cannot be read"):
        parse_sample(RawSample(key="a", record=b"[" * 100_000, is_json=True, media=(), sizes=()))
