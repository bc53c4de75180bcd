# SPDX-License-Identifier: Apache-2.0
"""Records of the tools that people use: LLaVA, ShareGPT, OpenAI, LLaMA-Factory, ms-swift, Alpaca."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from mindvl_data.errors import DataError
from mindvl_data.formats.conversation import conversation_record, read_conversations
from mindvl_data.formats.record import Origin, RecordError, SourceRecord, Url
from mindvl_data.formats.registry import FORMATS

IMAGE = {"type": "image"}


def convert(row: dict[str, Any]) -> SourceRecord:
    return conversation_record(Path("data"), Origin("rows.json", 1), row)


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_llama_factory_marks_images_in_the_text_of_messages() -> None:
    turns = [{"role": "user", "content": "<image>Who<image>?"}, {"role": "assistant", "content": "Two cats."}]
    record = convert({"messages": turns, "images": ["a.jpg", "b.jpg"]})
    assert record.media == (Path("data/a.jpg"), Path("data/b.jpg"))
    assert record.body["messages"][0]["content"] == [IMAGE, text("Who"), IMAGE, text("?")]
    assert record.body["messages"][1] == {"role": "assistant", "content": [text("Two cats.")]}


def test_media_that_no_text_mentions_precede_the_first_question() -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    record = convert({"messages": [*turns, {"role": "assistant", "content": "A cat."}], "image": "a.jpg"})
    assert record.body["messages"][1]["content"] == [IMAGE, text("Who?")]
    assert record.body["messages"][0] == turns[0]


def test_a_text_with_more_placeholders_than_media_stays_as_it_is() -> None:
    turns = [{"role": "user", "content": "<image><image>"}, {"role": "assistant", "content": "x"}]
    assert convert({"messages": turns, "images": ["a.jpg"]}).body["messages"] == turns


def test_a_data_url_is_decoded_and_an_address_is_kept() -> None:
    address = "https://host/cat.png"
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(b"png!").decode()}},
        {"type": "image_url", "image_url": {"url": address}},
        text("Same?"),
    ]
    record = convert({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "No."}]})
    assert record.media == (b"png!", Url(address))
    assert record.body["messages"][0]["content"] == [IMAGE, IMAGE, text("Same?")]


@pytest.mark.parametrize(
    ("url", "message"), [("data:image/png,abc", "must be in base64"), ("data:image/png;base64,a", "not base64")]
)
def test_a_broken_data_url_is_refused_without_printing_it(url: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        convert({"messages": [], "images": [url + "!" * 100_000]})
    assert len(str(caught.value)) < 300


def test_alpaca_joins_instruction_and_input_and_keeps_system_and_history() -> None:
    row = {
        "instruction": "Translate.",
        "input": "chat",
        "output": "cat",
        "system": "French.",
        "history": [["Hi", "Hello"]],
        "images": ["a.png"],
        "level": 2,
    }
    record = convert(row)
    roles = [(message["role"], message["content"]) for message in record.body["messages"]]
    assert roles == [
        ("system", "French."),
        ("user", [IMAGE, text("Hi")]),
        ("assistant", "Hello"),
        ("user", "Translate.\nchat"),
        ("assistant", "cat"),
    ]
    assert record.body["meta"] == {"level": 2}


def test_a_broken_history_is_refused() -> None:
    with pytest.raises(DataError, match="`history` must be a list of pairs"):
        convert({"instruction": "a", "output": "b", "history": [["only"]]})


def test_both_names_read_both_kinds_as_a_list_and_as_lines_whatever_the_name_of_the_file(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "lines.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert FORMATS["llava"] is FORMATS["messages"] is read_conversations
    for name in ("list.json", "lines.json"):
        found = read_conversations(tmp_path / name, None)
        records = list(found.records)
        assert found.total == 2
        assert [type(record) for record in records] == [SourceRecord, SourceRecord]


def test_boxes_of_ms_swift_are_refused(tmp_path):
    row = {
        "messages": [
            {"role": "user", "content": "<image>Where is <ref-object>?"},
            {"role": "assistant", "content": "<bbox>"},
        ],
        "images": ["1.png"],
        "objects": {"ref": ["the dog"], "bbox": [[1, 2, 3, 4]]},
    }
    with pytest.raises(RecordError, match=r"`objects` of ms-swift.* is not read\. Write the names into the text"):
        conversation_record(tmp_path, Origin(tmp_path / "a.jsonl", 1), row)


def test_an_image_in_base64_needs_no_data_url_and_other_long_names_are_shortened(tmp_path):
    origin, text = Origin(tmp_path / "a.jsonl", 1), base64.b64encode(bytes(1500)).decode()
    row = {"question": "q", "answer": "a", "image": text}
    assert conversation_record(tmp_path, origin, row).media == (bytes(1500),)
    with pytest.raises(RecordError, match=r"has 2001 characters and is not base64: '!a{39}'\.\.\."):
        conversation_record(tmp_path, origin, {**row, "image": "!" + 2000 * "a"})


def read(path: Path, rows: Any = None, root: Path | None = None) -> list[SourceRecord]:
    """The records of a file; an invalid one is raised. `rows` are written to the file before."""
    if rows is not None:
        path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    found = read_conversations(path, root)
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
    kinds = [type(item) for item in read_conversations(tmp_path / "r.json", None).records]
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


def test_images_are_named_by_the_row_or_by_the_part(tmp_path: Path) -> None:
    bare = {"messages": [{"role": "user", "content": [{"type": "image"}]}], "images": ["a.png"]}
    named = {"messages": [{"role": "user", "content": [{"type": "image", "image": "b.png"}, "?"]}]}
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(bare) + "\n\n" + json.dumps(named) + "\n")
    first, second = read(path)
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
        read(path)


def test_videos_and_images_keep_the_order_of_their_parts(tmp_path: Path) -> None:
    parts = [
        {"type": "video", "video": "v.mp4"},
        {"type": "image_url", "image_url": {"url": "file://a.png"}},
        {"type": "video"},
    ]
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": parts[:2]}]}))
    (record,) = read(path)
    assert record.media == (tmp_path / "v.mp4", tmp_path / "a.png")
    assert record.body["messages"][0]["content"] == [{"type": "video"}, {"type": "image"}]
    path.write_text(json.dumps({"messages": [{"role": "user", "content": parts}], "videos": ["v.mp4"]}))
    with pytest.raises(DataError, match="the text mentions 2 videos, the record has 1"):
        read(path)


def test_text_in_another_encoding_and_rows_after_it(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"messages": "\xe9"}\n' + json.dumps({"messages": []}).encode())
    bad, good = read_conversations(path, None).records
    assert isinstance(bad, RecordError)
    assert "not valid UTF-8" in str(bad)
    assert isinstance(good, SourceRecord)


def test_tools_and_what_the_assistant_thinks_and_calls_are_kept(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": [{"name": "f"}]}
    row = {"messages": [{"role": "user", "content": "?"}, answer], "tools": [{"name": "f"}], "kind": "x"}
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(row))
    assert read(path)[0].body == {"messages": row["messages"], "tools": row["tools"], "meta": {"kind": "x"}}
