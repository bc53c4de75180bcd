# SPDX-License-Identifier: Apache-2.0
"""Benchmark items from each format, by hand."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from mindvl_data.curation.contamination.benchmarks import read_benchmark
from mindvl_data.errors import DataError


def _png(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (value, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def test_a_table_without_answers_gives_questions_options_and_images(tmp_path: Path) -> None:
    image = base64.b64encode(_png(1)).decode()
    rows = [
        ("index", "image", "question", "hint", "A", "B"),
        ("7", image, "Which color?", "Look closely.", "red", "blue"),
        ("8", "7", "Which shape?", "", "", ""),
    ]
    path = tmp_path / "bench.tsv"
    path.write_text("\n".join("\t".join(row) for row in rows))
    first, second = read_benchmark(path)
    assert first.name == f"{path} row 1 (id 7)"
    joined = "Look closely.\nWhich color?\nA. red\nB. blue"
    assert first.texts == ("Look closely.", "Which color?", "red", "blue", joined)
    assert first.images == second.images == (_png(1),)
    assert second.texts == ("Which shape?",)


def test_parquet_rows_give_lists_of_options_and_every_image_column(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns: dict[str, Any] = {
        "id": ["a"],
        "question": ["What is 1 + 1?"],
        "options": ['["one", "two"]'],
        "answer": ["B"],
        "image_1": pa.array([{"bytes": _png(1), "path": None}], kind),
        "image_2": pa.array([{"bytes": _png(2), "path": None}], kind),
    }
    path = tmp_path / "test-00000-of-00001.parquet"
    pyarrow.parquet.write_table(pa.table(columns), path)
    for source in (path, tmp_path):
        (item,) = read_benchmark(source)
        assert item.texts == ("What is 1 + 1?", "one", "two", "B", "What is 1 + 1?\nA. one\nB. two")
        assert item.images == (_png(1), _png(2))


def test_json_lines_are_questions_or_conversations_with_images_beside_them(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(_png(3))
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]
    rows = [
        {"id": "q1", "question": "Read <image>", "answer": ["4071", "4 071"], "images": ["cat.png"]},
        {"image": "cat.png", "conversations": turns},
    ]
    path = tmp_path / "bench.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = read_benchmark(path)
    assert first.texts == ("Read <image>", "4071", "4 071")
    assert [text.strip() for text in second.texts] == ["What is it?", "A cat."]
    assert first.images == second.images == (_png(3),)


def test_a_missing_image_and_an_unknown_format_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text(json.dumps({"question": "Read", "image": "none.png"}))
    with pytest.raises(DataError, match=r"bench\.jsonl row 1: an image cannot be read"):
        list(read_benchmark(path))
    with pytest.raises(DataError, match=r"bench\.xlsx: the format of the benchmark is not known"):
        list(read_benchmark(tmp_path / "bench.xlsx"))
