# SPDX-License-Identifier: Apache-2.0
"""Records of the tools that people use, under both names of the format."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from mindvl_data.errors import DataError
from mindvl_data.formats.conversation import conversation_record
from mindvl_data.formats.llava import read_llava
from mindvl_data.formats.messages import read_messages
from mindvl_data.formats.record import Origin, RecordError, SourceRecord, Url

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
    for reader in (read_llava, read_messages):
        for name in ("list.json", "lines.json"):
            found = reader(tmp_path / name, None)
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
