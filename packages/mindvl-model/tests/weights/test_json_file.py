# SPDX-License-Identifier: Apache-2.0
"""JSON files are read with limits, and damaged files raise an error that names the file."""

from pathlib import Path

import pytest

from mindvl_model import WeightError
from mindvl_model.weights.json_file import MAX_JSON_BYTES, read_json


@pytest.mark.parametrize(
    "content",
    ["", "{", '{"a": 1, "b": 2, "a": 1}', "[" * 100_000, '{"a":' * 60 + "1" + "}" * 60, "9" * 5000, "\x00", "[1] 2"],
)
def test_damaged_json_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(WeightError, match=r"x\.json: not valid JSON \(.{1,220}\)\. Download") as caught:
        read_json(tmp_path / "x.json")
    assert len(str(caught.value)) < 500


def test_bytes_that_are_no_text_directories_and_sizes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WeightError, match="not valid JSON"):
        read_json(path)
    path.write_bytes(b"\xef\xbb\xbf{}")  # transformers refuses a byte order mark, too
    with pytest.raises(WeightError, match="not valid JSON"):
        read_json(path)
    with open(path, "wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(WeightError, match=f"at most {MAX_JSON_BYTES} bytes, got {MAX_JSON_BYTES + 1}"):
        read_json(path)
    with pytest.raises(WeightError, match="not a regular file"):
        read_json(tmp_path)
    with pytest.raises(WeightError, match="does not exist"):
        read_json(tmp_path / "gone")
    path.write_text('{"a": [1, {"b": null}]}')
    assert read_json(path) == {"a": [1, {"b": None}]}
