# SPDX-License-Identifier: Apache-2.0
"""OpenAI-style rows."""

import json
from pathlib import Path

import pytest

from mindvl_data import DataError
from mindvl_data.formats.messages import read_messages


def test_images_are_named_by_the_row_or_by_the_part(tmp_path: Path) -> None:
    bare = {"messages": [{"role": "user", "content": [{"type": "image"}]}], "images": ["a.png"]}
    named = {"messages": [{"role": "user", "content": [{"type": "image", "image": "b.png"}, "?"]}]}
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(bare) + "\n\n" + json.dumps(named) + "\n")
    first, second = read_messages(path, None).records
    assert first.images == (tmp_path / "a.png",)
    assert second.images == (tmp_path / "b.png",)
    assert second.body["messages"][0]["content"] == [{"type": "image"}, "?"]
    assert second.where.endswith("row 3")


@pytest.mark.parametrize(("line", "message"), [("{", "broken JSON"), ("[]", "instead of an object"), ("{}", "no list")])
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"messages": []}) + "\n" + line)
    with pytest.raises(DataError, match=rf"{message}.*r\.jsonl row 2"):
        list(read_messages(path, None).records)
