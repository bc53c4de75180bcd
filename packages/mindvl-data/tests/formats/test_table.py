# SPDX-License-Identifier: Apache-2.0
"""CSV and TSV tables of images."""

from pathlib import Path

import pytest

from mindvl_data.errors import DataError
from mindvl_data.formats.record import RecordError, SourceRecord, Url
from mindvl_data.formats.table import read_table


def read(path: Path, text: str) -> list[SourceRecord | RecordError]:
    path.write_text(text, encoding="utf-8")
    found = read_table(path, None)
    records = list(found.records)
    assert found.total == len(records)
    return records


def test_openclip_names_the_file_and_the_title(tmp_path: Path) -> None:
    (record,) = read(tmp_path / "a.csv", 'filepath,title,source\nx/1.jpg,"a cat, asleep",web\n')
    assert isinstance(record, SourceRecord)
    assert record.media == (tmp_path / "x/1.jpg",)
    assert record.body == {"content": [{"type": "image"}, "a cat, asleep"], "meta": {"source": "web"}}


def test_questions_and_answers_are_a_conversation_and_an_address_is_kept(tmp_path: Path) -> None:
    (record,) = read(tmp_path / "a.tsv", "\ufeffimage\tquestion\tanswer\nhttps://h/1.png\tWho?\tA cat\n")
    assert isinstance(record, SourceRecord)
    assert record.media == (Url("https://h/1.png"),)
    assert [message["role"] for message in record.body["messages"]] == ["user", "assistant"]


def test_semicolons_separate_too_and_a_title_beside_a_caption_is_kept_as_it_is(tmp_path: Path) -> None:
    (record,) = read(tmp_path / "a.csv", "image;caption;title\n1.jpg;a dog;Rex\n")
    assert isinstance(record, SourceRecord)
    assert record.body == {"content": [{"type": "image"}, "a dog"], "meta": {"title": "Rex"}}


def test_a_row_with_another_number_of_fields_is_named(tmp_path: Path) -> None:
    good, bad = read(tmp_path / "a.csv", "image,caption\n1.jpg,a\n2.jpg\n")
    assert isinstance(good, SourceRecord)
    assert "row 2: expected 2 fields as in the header, got 1" in str(bad)


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("image,caption\n1.jpg,caf\u00e9\n".encode("latin-1"))
    with pytest.raises(DataError, match="not valid UTF-8"):
        read_table(tmp_path / "a.csv", None)
