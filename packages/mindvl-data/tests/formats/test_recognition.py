# SPDX-License-Identifier: Apache-2.0
"""The format of what people have is recognized, with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from mindvl_data.errors import DataError
from mindvl_data.formats.recognition import recognize
from mindvl_data.formats.registry import FORMATS

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": CHAT}, "messages"),
        ({"conversations": []}, "llava"),
        ({"instruction": "a", "output": "b"}, "messages"),
        ({"text": "a"}, "text"),
    ],
)
@pytest.mark.parametrize("as_list", [True, False])
def test_the_first_record_decides(tmp_path: Path, row: dict[str, Any], expected: str, as_list: bool) -> None:
    path = tmp_path / ("rows.json" if as_list else "rows.jsonl")
    path.write_text(json.dumps([row] if as_list else row))
    source, name, reason = recognize(path)
    assert (source, name) == (path, expected)
    assert all(field in reason for field in list(row)[:1])


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.jpg": "", "a.txt": "a cat"}, "imagefolder"),
        ({"captions.jsonl": "", "a.jpg": ""}, "imagefolder"),
        ({"cat/a.jpg": "", "dog/b.jpg": ""}, "classes"),
        ({"data/part-0.parquet": ""}, "parquet"),
        ({"state.json": "{}", "data.arrow": ""}, "datasets"),
        ({"dataset_dict.json": "{}"}, "datasets"),
        ({"metadata.csv": "file_name,text\n", "a.jpg": ""}, "table"),
    ],
)
def test_the_files_of_a_directory_decide(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    source, name, _ = recognize(tmp_path)
    assert name == expected
    assert name in FORMATS
    assert source == (tmp_path / "metadata.csv" if expected == "table" else tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", "image,caption\n", "table"),
        ("a.tsv", "image\tcaption\n", "table"),
        ("a.tsv", "index\timage\tquestion\tanswer\n", "tsv"),
        ("a.parquet", "", "parquet"),
    ],
)
def test_the_name_and_the_header_of_a_file_decide(tmp_path: Path, name: str, text: str, expected: str) -> None:
    (tmp_path / name).write_text(text)
    assert recognize(tmp_path / name)[1] == expected


@pytest.mark.parametrize("source", ["https://h/a-{000..003}.tar", "pipe:cat a.tar", "shards/a.tar"])
def test_addresses_and_tar_files_are_read_by_webdataset(source: str) -> None:
    assert recognize(source) == (source, "webdataset", "it is an address, a pattern or a tar file")


def test_what_is_not_recognized_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[{"alpha": 1}]')
    with pytest.raises(DataError, match="the first record has 'alpha'"):
        recognize(tmp_path / "rows.json")
    (tmp_path / "notes.docx").touch()
    with pytest.raises(DataError, match=r"format of a \.docx file"):
        recognize(tmp_path / "notes.docx")
    (tmp_path / "rows.json").unlink()
    with pytest.raises(DataError, match=r"it has \.docx\. Add captions"):
        recognize(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        recognize(tmp_path / "nothing")
    (tmp_path / "a.tar").touch()
    with pytest.raises(DataError, match="already holds shards"):
        recognize(tmp_path)


def test_the_only_local_file_of_llama_factory_is_read(tmp_path):
    (tmp_path / "a.json").write_text('[{"instruction": "x", "input": "", "output": "y"}]')
    info = {"first": {"file_name": "a.json"}, "second": {"hf_hub_url": "org/name"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    expected = "dataset_info.json describes first, and the first record has `instruction` and `output`"
    for source in (tmp_path, tmp_path / "dataset_info.json"):
        assert recognize(source) == (tmp_path / "a.json", "messages", expected)
    (tmp_path / "b.json").write_text("[]")
    info["third"] = {"file_name": "b.json"}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(
        DataError, match=r"describes first \(a.json\), second \(no file_name\), third \(b.json\)\. Specify"
    ):
        recognize(tmp_path)


def test_a_text_with_the_address_it_comes_from_is_plain_text(tmp_path):
    path = tmp_path / "web.jsonl"
    path.write_text('{"text": "a page", "url": "https://example.com", "timestamp": "2019"}\n')
    assert recognize(path)[1] == "text"


def test_the_only_data_file_of_a_directory_is_read_before_its_images_are_classes(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "1.png").write_bytes(b"")
    (tmp_path / "train.json").write_text('[{"image": "images/1.png", "caption": "a"}]')
    reason = "the directory has one data file, train.json, and the first record has `image`, `caption`"
    assert recognize(tmp_path) == (tmp_path / "train.json", "messages", reason)
    (tmp_path / "test.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"has 2 data files \(test.jsonl, train.json\)\. Specify one of them\."):
        recognize(tmp_path)


def test_packed_files_and_objects_are_refused_with_what_they_are(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"a \.gz file is not read\. Unpack it"):
        recognize(tmp_path / "a.jsonl.gz")
    (tmp_path / "coco.json").write_text('{"images": [], "annotations": [\n1]}')
    with pytest.raises(DataError, match="got an object with 'images', 'annotations'"):
        recognize(tmp_path / "coco.json")
