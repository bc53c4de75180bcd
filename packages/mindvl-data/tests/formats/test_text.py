# SPDX-License-Identifier: Apache-2.0
"""Plain text rows."""

import json
from pathlib import Path

import pytest

from mindvl_data import DataError
from mindvl_data.formats.record import RecordError, SourceRecord
from mindvl_data.formats.text import read_text


def first(path: Path) -> SourceRecord:
    record = next(read_text(path, None).records)
    if isinstance(record, RecordError):
        raise record
    return record


def test_a_text_is_learned_whole_and_the_rest_of_the_row_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"text": "once", "id": 4, "url": "u"}))
    record = first(path)
    assert record.body == {"content": "once", "id": "4", "meta": {"url": "u"}}


def test_a_row_without_text_and_a_file_in_another_encoding_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"txt": 1}')
    with pytest.raises(DataError, match=r"t\.jsonl row 1: .*`text` must be a string"):
        first(path)
    path.write_bytes('{"text": "\xe9"}'.encode("latin-1"))
    with pytest.raises(DataError, match="not valid UTF-8"):
        first(path)
    with pytest.raises(DataError, match="does not exist"):
        read_text(tmp_path / "nowhere.jsonl", None)
    with pytest.raises(DataError, match="--image-root"):
        read_text(path, tmp_path)
