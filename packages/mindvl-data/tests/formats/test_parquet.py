# SPDX-License-Identifier: Apache-2.0
"""Hugging Face data sets in parquet files."""

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mindvl_data import DataError
from mindvl_data.formats.parquet import read_parquet
from mindvl_data.formats.record import RecordError, SourceRecord

TURNS = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "yes"}]
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def read(path: Path, root: Path | None = None) -> list[SourceRecord | RecordError]:
    found = read_parquet(path, root)
    records = list(found.records)
    assert found.total == len(records)
    return records


def one(tmp_path: Path, **columns: Any) -> SourceRecord:
    pq.write_table(pa.table({name: pa.array([value]) for name, value in columns.items()}), tmp_path / "t.parquet")
    (record,) = read(tmp_path / "t.parquet")
    if isinstance(record, RecordError):
        raise record
    return record


def test_images_come_as_bytes_as_names_and_in_lists(tmp_path: Path) -> None:
    both = one(tmp_path, images=[{"bytes": b"1", "path": None}, {"bytes": None, "path": "a.png"}], caption="two")
    assert both.media == (b"1", tmp_path / "a.png")
    assert both.body["content"] == [{"type": "image"}, {"type": "image"}, "two"]
    assert one(tmp_path, image=b"2", text="x").media == (b"2",)
    assert one(tmp_path, image="b.png", text="x").media == (tmp_path / "b.png",)
    assert one(tmp_path, photo={"bytes": b"3", "path": ""}, text="x", image=None).media == (b"3",)
    assert one(tmp_path, jpg=[[b"4"], [b"5"]], text="x").media == (b"4", b"5")


def test_conversations_are_known_by_their_columns(tmp_path: Path) -> None:
    image = {"bytes": b"1", "path": "p"}
    for columns in (
        {"conversations": TURNS},
        {"conversations": '[{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "yes"}]'},
        {"messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "yes"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "?"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
            ]
        },
        {"texts": [{"user": "?", "assistant": "yes"}]},
        {"question": "?", "answer": "yes"},
        {"query": "?", "label": ["yes", "no"]},
    ):
        record = one(tmp_path, image=image, id=5, score=0.5, **columns)
        user, assistant = record.body["messages"]
        assert user["role"] == "user"
        assert user["content"] == [{"type": "image"}, {"type": "text", "text": "?"}], columns
        assert assistant["content"] in ("yes", [{"type": "text", "text": "yes"}])
        assert record.body["id"] == "5"
        assert record.body["meta"] == {"score": 0.5}


def test_files_of_a_directory_are_read_in_name_order_and_bad_rows_are_named(tmp_path: Path) -> None:
    for name, texts in (("b", ["3"]), ("a", ["1", None, "2"])):
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{name}.parquet")
    first, bad, *rest = read(tmp_path)
    assert [r.body["content"] for r in (first, *rest) if isinstance(r, SourceRecord)] == [["1"], ["2"], ["3"]]
    assert isinstance(bad, RecordError)
    assert "expected a conversation" in str(bad)
    assert str(bad.origin).endswith("a.parquet row 2")


def test_videos_stand_in_the_order_of_their_placeholders(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "<video><image>"}, {"from": "gpt", "value": "yes"}]
    assert one(tmp_path, image=b"i", video=b"v", conversations=turns).media == (b"v", b"i")


def test_a_damaged_file_and_a_missing_library_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"t\.parquet: not a parquet file"):
        read_parquet(tmp_path, None)
    with pytest.raises(DataError, match="no parquet file"):
        read_parquet(tmp_path / "nowhere", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"Install mindvl-data\[parquet\]"):
        read_parquet(tmp_path, None)


def test_a_table_of_images_keeps_its_types(tmp_path: Path) -> None:
    table = pa.table({"image": pa.array([None, {"bytes": b"1", "path": None}], IMAGE), "text": ["alone", "shown"]})
    pq.write_table(table, tmp_path / "t.parquet")
    assert [r.media for r in read(tmp_path) if isinstance(r, SourceRecord)] == [(), (b"1",)]
