# SPDX-License-Identifier: Apache-2.0
"""LLaVA and ShareGPT rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from mindvl_data import DataError
from mindvl_data.formats.llava import read_llava
from mindvl_data.formats.record import RecordError, SourceRecord


def read(path: Path, rows: Any, root: Path | None = None) -> list[SourceRecord]:
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    found = read_llava(path, root)
    records = []
    for record in found.records:
        if isinstance(record, RecordError):
            raise record
        records.append(record)
    assert found.total >= len(records)
    return records


def row(value: str, **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": value}, {"from": "gpt", "value": "ok"}], **more}


def test_placeholders_become_parts_in_place(tmp_path: Path) -> None:
    boxes = [[1, 2, 3, 4], {"image": 1, "xyxy": [5, 6, 7, 8]}]
    text = "<image><image>\nIs <box:1> left of <point:0>?"
    (record,) = read(tmp_path / "r.json", [row(text, image=["a", "b"], boxes=boxes, points=[[9, 9]])])
    assert record.body["messages"][0]["content"] == [
        {"type": "image"},
        {"type": "image"},
        {"type": "text", "text": "\nIs "},
        {"type": "box", "image": 1, "xyxy": [5, 6, 7, 8]},
        {"type": "text", "text": " left of "},
        {"type": "point", "image": 0, "xy": [9, 9]},
        {"type": "text", "text": "?"},
    ]
    assert record.media == (tmp_path / "a", tmp_path / "b")
    assert "meta" not in record.body


def test_a_text_only_row_needs_no_image(tmp_path: Path) -> None:
    (record,) = read(tmp_path / "r.json", [row("hello")])
    assert record.media == ()


def test_a_video_stands_where_its_placeholder_is(tmp_path: Path) -> None:
    (record,) = read(tmp_path / "r.json", [row("<video>then<image>", image="a.png", video=["b.mp4"])])
    assert record.media == (tmp_path / "b.mp4", tmp_path / "a.png")
    assert [part["type"] for part in record.body["messages"][0]["content"]] == ["video", "text", "image"]
    with pytest.raises(DataError, match="the text mentions 1 videos, the record has 2"):
        read(tmp_path / "r.json", [row("<video>a", video=["b.mp4", "c.mp4"])])


def test_a_bad_row_does_not_end_the_rows_after_it(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps([row("a"), {"conversations": 1}, 7, row("b")]))
    kinds = [type(item) for item in read_llava(tmp_path / "r.json", None).records]
    assert kinds == [SourceRecord, RecordError, RecordError, SourceRecord]


def test_json_lines_and_an_image_root_work_too(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(row("<image>", image=name)) for name in "ab")
    records = read(tmp_path / "r.jsonl", lines, tmp_path / "images")
    assert [r.media[0] for r in records] == [tmp_path / "images" / name for name in "ab"]
    assert str(records[1].origin).endswith("r.jsonl row 2")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("[{", r"r\.json: invalid JSON"),
        ({}, "must hold a JSON list, got an object with no fields"),
        ([row("a"), 5], r"r\.json row 2"),
        ([{"id": 1}], "needs a list `messages` or `conversations`, .* got 'id'"),
        ([{"conversations": [{"from": "bot", "value": "a"}]}], r"row 1: turn 0 .*'bot'"),
        ([{"conversations": ["a"]}], "turn 0"),
        ([row("<box:0>")], "`boxes` has no entry 0"),
        ([row("a", image=3)], "must be a file name or a list of file names, got 3"),
    ],
)
def test_what_is_wrong_is_named_by_file_and_row(tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path / "r.json", rows)
