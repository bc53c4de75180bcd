# SPDX-License-Identifier: Apache-2.0
"""Directories by class."""

from pathlib import Path

import pytest

from mindvl_data.errors import DataError
from mindvl_data.formats.classes import QUESTION, read_classes
from mindvl_data.formats.record import SourceRecord


def test_the_name_of_the_subdirectory_is_the_answer(tmp_path: Path) -> None:
    for name in ("polar_bear/1.jpg", "cat/b/2.PNG", "cat/notes.txt", "loose.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = read_classes(tmp_path, None)
    records = [record for record in found.records if isinstance(record, SourceRecord)]
    assert found.total == 2
    assert [record.body["id"] for record in records] == ["cat/b/2.PNG", "polar_bear/1.jpg"]
    assert [record.body["messages"][1]["content"] for record in records] == ["cat", "polar bear"]
    assert records[1].body["messages"][0]["content"][1] == {"type": "text", "text": QUESTION}
    assert records[1].body["meta"] == {"class": "polar_bear"}


def test_a_directory_without_classes_and_an_image_root_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no subdirectory with images"):
        read_classes(tmp_path, None)
    with pytest.raises(DataError, match="--image-root"):
        read_classes(tmp_path, tmp_path)
