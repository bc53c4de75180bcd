# SPDX-License-Identifier: Apache-2.0
"""VLMEvalKit tables."""

import base64
from pathlib import Path

import pytest

from mindvl_data import DataError
from mindvl_data.formats.record import RecordError, SourceRecord
from mindvl_data.formats.tsv import CHOOSE, read_tsv

IMAGES = [bytes([n]) * 90 for n in range(3)]
CODES = [base64.b64encode(image).decode() for image in IMAGES]


def table(tmp_path: Path, *rows: tuple[str, ...], header: str = "index image question A B answer category") -> Path:
    path = tmp_path / "t.tsv"
    path.write_text("\n".join("\t".join(row) for row in (tuple(header.split()), *rows)) + "\n")
    return path


def read(path: Path) -> list[SourceRecord | RecordError]:
    found = read_tsv(path, None)
    records = list(found.records)
    assert found.total == len(records)
    return records


def test_a_row_with_options_becomes_a_question_with_a_letter_for_an_answer(tmp_path: Path) -> None:
    (record,) = read(table(tmp_path, ("7", CODES[0], "Which?", "red", "blue", "B", "colour")))
    assert isinstance(record, SourceRecord)
    assert record.media == (IMAGES[0],)
    user, assistant = record.body["messages"]
    assert user["content"] == [{"type": "image"}, {"type": "text", "text": f"Which?\nA. red\nB. blue\n{CHOOSE}"}]
    assert assistant["content"] == "B"
    assert record.body["id"] == "7"
    assert record.body["meta"] == {"category": "colour"}


def test_a_short_image_is_the_image_of_an_earlier_row_and_a_list_holds_several(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        ("1", CODES[0], "a?", "", "", "one", ""),
        ("2", "1", "b?", "", "", "two", ""),
        ("3", f"['{CODES[1]}', '{CODES[2]}']", "c?", "", "", "three", ""),
        ("4", "9", "d?", "", "", "four", ""),
    )
    one, two, three, four = read(path)
    assert [r.media for r in (one, two, three) if isinstance(r, SourceRecord)] == [
        (IMAGES[0],),
        (IMAGES[0],),
        (IMAGES[1], IMAGES[2]),
    ]
    assert isinstance(three, SourceRecord)
    assert [part["type"] for part in three.body["messages"][0]["content"]] == ["image", "image", "text"]
    assert "refers to index '9'" in str(four)
    assert "t.tsv row 4" in str(four)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("1", "", "", "", "", "x", ""), "no question"),
        (("1", "", "q", "", "", "", ""), "has no answer"),
        (("1", "", "q", "a", "b", "C", ""), "must be one of the options A, B, got 'C'"),
        (("1", "!" * 80, "q", "", "", "x", ""), "not base64"),
        (("1", "q"), "expected 7 fields as in the header, got 2"),
    ],
)
def test_what_is_wrong_is_named_by_row(tmp_path: Path, row: tuple[str, ...], message: str) -> None:
    good = ("0", CODES[0], "q", "", "", "x", "")
    first, bad = read(table(tmp_path, good, row))
    assert isinstance(first, SourceRecord)
    assert isinstance(bad, RecordError)
    assert message in bad.what
    assert bad.origin.row == 2


def test_a_table_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column `question`"):
        read(table(tmp_path, header="a b"))
    with pytest.raises(DataError, match="the file does not exist"):
        read_tsv(tmp_path / "nowhere.tsv", None)


def test_images_can_lie_beside_the_table_and_fields_can_hold_lines(tmp_path: Path) -> None:
    path = table(tmp_path, ("1", "p/a.png", '"two\nlines"', "x"), header="index image_path question answer")
    (record,) = read(path)
    assert isinstance(record, SourceRecord)
    assert record.media == (tmp_path / "p/a.png",)
    assert record.body["messages"][0]["content"][1]["text"] == "two\nlines"
