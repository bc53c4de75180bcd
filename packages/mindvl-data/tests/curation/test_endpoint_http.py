# SPDX-License-Identifier: Apache-2.0
"""Replies, pauses and images of one request; faults of servers are tested in test_endpoint.py."""

import base64
import io
import json

import pytest
from PIL import Image

from mindvl_data.curation.endpoint_http import image_url, parse_reply, retry_after, shown
from mindvl_data.curation.endpoint_store import Reply
from mindvl_data.errors import SampleError


def _reply(**message: object) -> bytes:
    return json.dumps({"choices": [{"message": message, "finish_reason": "length"}]}).encode()


def test_a_reply_without_usage_counts_as_expected() -> None:
    assert parse_reply(_reply(content="a"), 70) == Reply("a", "length", 70, 0)


def test_an_empty_answer_and_half_a_surrogate_pair_are_texts() -> None:
    assert parse_reply(_reply(content=None), 1).text == ""
    assert parse_reply(b'{"choices": [{"message": {"content": "a\\ud83d"}}]}', 1).text == "a?"


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b'{"choices": []}', b'{"error": "overloaded"}', _reply(content=5), b"[" * 100_000, b"\xff"]
)
def test_what_is_no_chat_completion_is_refused(content: bytes) -> None:
    with pytest.raises(match="not a chat completion"):
        parse_reply(content, 1)


def test_retry_after_is_a_number_of_seconds_or_a_date() -> None:
    assert retry_after("2.5", 0.0) == 2.5
    assert retry_after("Thu, 01 Jan 1970 00:01:40 GMT", 40.0) == 60.0
    assert retry_after(None, 0.0) == retry_after("soon", 0.0) == 0.0


def test_a_message_shows_binary_replies_on_one_line() -> None:
    assert shown(b"a\nb") == r"'a\nb'"
    assert len(shown(b"x" * 1000)) == 200


def test_a_turned_image_is_sent_upright() -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    Image.new("RGB", (40, 20)).save(file, "JPEG", exif=exif)
    url, pixels = image_url(file.getvalue(), 10_000)
    sent = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))))
    assert (sent.size, pixels, dict(sent.getexif())) == ((20, 40), 800, {})


def test_bytes_that_are_no_image_are_a_failed_record() -> None:
    with pytest.raises(SampleError, match="cannot be opened"):
        image_url(b"%PDF-1.7", 10_000)
