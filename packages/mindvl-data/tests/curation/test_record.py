# SPDX-License-Identifier: Apache-2.0
"""Texts, images and copies of curation records."""

import io

import numpy as np
import pytest
from PIL import Image

from mindvl_data.curation.record import Record
from mindvl_data.errors import SampleError

CHAT = {
    "messages": [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "A cat."},
    ]
}


def test_the_texts_of_a_conversation_are_listed_in_order_and_answers_apart() -> None:
    record = Record(number=0, id="a", body=CHAT)
    assert record.texts() == ["What is it?", "A cat."]
    assert record.answers() == ["A cat."]


def test_the_texts_of_content_are_all_answers() -> None:
    record = Record(number=0, id="a", body={"content": [{"type": "image"}, "one", {"type": "text", "text": "two"}]})
    assert record.texts() == record.answers() == ["one", "two"]


def test_changing_texts_keeps_media_parts_and_the_original() -> None:
    record = Record(number=0, id="a", body=CHAT)
    changed = record.map_texts(str.upper)
    assert changed.texts() == ["WHAT IS IT?", "A CAT."]
    assert changed.body["messages"][0]["content"][0] == {"type": "image"}
    assert record.texts() == ["What is it?", "A cat."]


def test_an_image_is_decoded_upright_and_again_after_media_change() -> None:
    def png(value: int) -> bytes:
        buffer = io.BytesIO()
        Image.new("RGB", (3, 2), (value, 0, 0)).save(buffer, "PNG")
        return buffer.getvalue()

    record = Record(number=0, id="a", body={"content": "x"}, media=(png(7),))
    assert record.image().shape == (2, 3, 3)
    assert np.all(record.image()[..., 0] == 7)
    assert np.all(record.with_facts(a=1).with_media((png(9),)).image()[..., 0] == 9)


def test_an_image_that_does_not_exist_is_an_error_of_the_sample() -> None:
    with pytest.raises(SampleError, match="the record has 0 media, none at position 0"):
        Record(number=0, id="", body={}).image()
