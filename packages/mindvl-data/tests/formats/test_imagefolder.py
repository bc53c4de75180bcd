# SPDX-License-Identifier: Apache-2.0
"""Directories of images with captions."""

import json
from pathlib import Path

import pytest

from mindvl_data import DataError
from mindvl_data.formats.imagefolder import read_imagefolder
from mindvl_data.formats.record import RecordError, SourceRecord


def read(directory: Path) -> list[SourceRecord]:
    records = []
    for record in read_imagefolder(directory, None).records:
        if isinstance(record, RecordError):
            raise record
        records.append(record)
    return records


def test_a_text_file_beside_an_image_is_its_caption(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.jpg", "sub/a.PNG"):
        (tmp_path / name).touch()
        (tmp_path / name).with_suffix(".txt").write_text(f"about {name}\n")
    records = read(tmp_path)
    assert read_imagefolder(tmp_path, None).total == 2
    assert [r.body["id"] for r in records] == ["b.jpg", "sub/a.PNG"]
    assert records[0].body["content"] == [{"type": "image"}, "about b.jpg"]


def test_one_captions_file_can_hold_all(tmp_path: Path) -> None:
    rows = [{"image": "a.png", "text": "one"}, {"image": ["a.png", "b.png"], "text": "two", "by": "me"}]
    (tmp_path / "captions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    one, two = read(tmp_path)
    assert one.media == (tmp_path / "a.png",)
    assert two.body == {"content": [{"type": "image"}, {"type": "image"}, "two"], "meta": {"by": "me"}}


def test_an_image_without_a_caption_and_an_empty_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the directory has no images"):
        read_imagefolder(tmp_path, None)
    (tmp_path / "a.webp").touch()
    with pytest.raises(DataError, match=r"a\.webp: the image has no caption.*a\.txt"):
        read(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        read_imagefolder(tmp_path / "nowhere", None)


def test_a_video_has_a_caption_like_an_image(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").touch()
    (tmp_path / "a.txt").write_text("a ball falls")
    (record,) = read(tmp_path)
    assert record.body["content"] == [{"type": "video"}, "a ball falls"]
    (tmp_path / "captions.jsonl").write_text(json.dumps({"image": "p.png", "video": "a.mp4", "text": "both"}))
    (record,) = read(tmp_path)
    assert record.media == (tmp_path / "p.png", tmp_path / "a.mp4")
    assert record.body["content"] == [{"type": "image"}, {"type": "video"}, "both"]
