# SPDX-License-Identifier: Apache-2.0
"""Benchmark files: what is read, and errors by file and row."""

import json

import pytest

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation import load_benchmarks


def test_rows_become_items(tmp_path):
    (tmp_path / "0.png").write_bytes(b"not decoded by the reader")
    row = {
        "id": "p",
        "task": "locate",
        "score": "point",
        "images": ["0.png"],
        "question": "<image>\nwhere",
        "answer": "",
    }
    path = tmp_path / "mixed.jsonl"
    path.write_text(json.dumps({**row, "box": [10, 10, 30, 30]}) + "\n")
    (benchmark,) = load_benchmarks(path)
    assert (benchmark.name, len(benchmark.items)) == ("mixed", 1)
    point = benchmark.items[0]
    assert (point.task, point.score, point.box) == ("locate", "point", (10, 10, 30, 30))
    assert point.images == (tmp_path / "0.png",)


def test_a_directory_gives_one_benchmark_per_file(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "1+1", "answer": "2"}\n\n')
    first, second = load_benchmarks(tmp_path)
    assert (first.name, second.name) == ("a", "b")
    assert (first.items[0].id, first.items[0].task, first.items[0].score) == ("a-00001", "a", "exact")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"bench\.jsonl:2: .* Write one object per line"),
        ("[1]", "must be an object, got list"),
        ({"question": 3}, "question must be text, got 3"),
        ({"question": "a"}, "answer must be text, got None"),
        ({"answr": "a"}, "field 'answr' is unknown"),
        ({"question": "a", "answer": "b", "score": "fuzzy"}, "score 'fuzzy' is unknown"),
        ({"question": "<image>", "answer": "b"}, "1 <image> placeholders for 0 images"),
        ({"question": "<image>", "answer": "b", "images": ["no.png"]}, r"image .* does not exist"),
        ({"question": "a", "answer": "b", "images": "no.png"}, "got 'no.png'"),
        ({"question": "a", "answer": "b", "score": "box"}, "score 'box' needs a box"),
        ({"question": "a", "answer": "b", "box": [5, 5, 1, 9]}, "box .5, 5, 1, 9. is not valid"),
        ({"id": "x", "question": "a", "answer": "b"}, "id 'x' is used twice"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, row, message):
    path = tmp_path / "bench.jsonl"
    text = row if isinstance(row, str) else json.dumps(row)
    path.write_text('{"id": "x", "question": "a", "answer": "b"}\n' + text + "\n")
    with pytest.raises(EvaluationError, match=message) as caught:
        load_benchmarks(path)
    assert f"{path}:2" in str(caught.value)


def test_missing_and_empty_benchmarks_are_named(tmp_path):
    with pytest.raises(EvaluationError, match="does not exist"):
        load_benchmarks(tmp_path / "no.jsonl")
    with pytest.raises(EvaluationError, match=r"no \.jsonl file"):
        load_benchmarks(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(EvaluationError, match="the benchmark is empty"):
        load_benchmarks(tmp_path / "empty.jsonl")
