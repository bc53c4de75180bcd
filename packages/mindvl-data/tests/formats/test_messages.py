# SPDX-License-Identifier: Apache-2.0
"""OpenAI-style rows."""

import json
from pathlib import Path

import pytest

from mindvl_data import DataError
from mindvl_data.formats.messages import read_messages
from mindvl_data.formats.record import RecordError, SourceRecord


def records(path: Path) -> list[SourceRecord]:
    found = []
    for record in read_messages(path, None).records:
        if isinstance(record, RecordError):
            raise record
        found.append(record)
    return found


def test_images_are_named_by_the_row_or_by_the_part(tmp_path: Path) -> None:
    bare = {"messages": [{"role": "user", "content": [{"type": "image"}]}], "images": ["a.png"]}
    named = {"messages": [{"role": "user", "content": [{"type": "image", "image": "b.png"}, "?"]}]}
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(bare) + "\n\n" + json.dumps(named) + "\n")
    first, second = records(path)
    assert first.media == (tmp_path / "a.png",)
    assert second.media == (tmp_path / "b.png",)
    assert second.body["messages"][0]["content"] == [{"type": "image"}, "?"]
    assert str(second.origin).endswith("row 3")


@pytest.mark.parametrize(
    ("line", "message"), [("{", "invalid JSON"), ("[]", "must be an object"), ("{}", "needs a list `messages`")]
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"messages": []}) + "\n" + line)
    with pytest.raises(DataError, match=rf"r\.jsonl row 2: .*{message}"):
        records(path)


def test_videos_and_images_keep_the_order_of_their_parts(tmp_path: Path) -> None:
    parts = [
        {"type": "video", "video": "v.mp4"},
        {"type": "image_url", "image_url": {"url": "file://a.png"}},
        {"type": "video"},
    ]
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": parts[:2]}]}))
    (record,) = records(path)
    assert record.media == (tmp_path / "v.mp4", tmp_path / "a.png")
    assert record.body["messages"][0]["content"] == [{"type": "video"}, {"type": "image"}]
    path.write_text(json.dumps({"messages": [{"role": "user", "content": parts}], "videos": ["v.mp4"]}))
    with pytest.raises(DataError, match="the text mentions 2 videos, the record has 1"):
        records(path)


def test_text_in_another_encoding_and_rows_after_it(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"messages": "\xe9"}\n' + json.dumps({"messages": []}).encode())
    bad, good = read_messages(path, None).records
    assert isinstance(bad, RecordError)
    assert "not valid UTF-8" in str(bad)
    assert isinstance(good, SourceRecord)


def test_tools_and_what_the_assistant_thinks_and_calls_are_kept(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": [{"name": "f"}]}
    row = {"messages": [{"role": "user", "content": "?"}, answer], "tools": [{"name": "f"}], "kind": "x"}
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(row))
    assert records(path)[0].body == {"messages": row["messages"], "tools": row["tools"], "meta": {"kind": "x"}}
