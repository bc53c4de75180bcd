# SPDX-License-Identifier: Apache-2.0
"""Columns of tables; tests/formats/test_parquet.py has the columns of arrow schemas."""

from pathlib import Path

import pytest

from mindvl_data.formats.columns import column_record, with_media_apart
from mindvl_data.formats.record import Origin, RecordError


def test_media_stand_apart_from_other_columns_and_null_values_are_left_out() -> None:
    row = {"left": "a.png", "right": None, "caption": "x", "note": None}
    kinds = {"left": "image", "right": "image"}
    assert with_media_apart(row, kinds) == {"": {"image": ["a.png", None]}, "caption": "x"}


def test_instruction_and_input_are_one_question() -> None:
    row = {"": {}, "instruction": "Translate.", "input": "chat", "output": "cat"}
    record = column_record(Path("data"), Origin("t.parquet", 1), row)
    assert record.body["messages"][0]["content"][-1] == {"type": "text", "text": "Translate.\nchat"}
    assert "meta" not in record.body


def test_columns_that_mean_nothing_are_named() -> None:
    with pytest.raises(RecordError, match="got the columns alpha, beta"):
        column_record(Path("data"), Origin("t.csv", 1), {"": {}, "alpha": "1", "beta": "2"})
