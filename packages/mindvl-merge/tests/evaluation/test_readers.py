# SPDX-License-Identifier: Apache-2.0
"""Benchmark files: JSONL, TSV and parquet become items; every problem is named with its line."""

import base64
import csv
import io
import json

import pytest

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation import Item, find_metric, load_benchmarks, score
from mindvl_merge.evaluation.benchmark import IMAGE_MARK
from mindvl_merge.evaluation.readers import recognize


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
    with pytest.raises(EvaluationError, match=r"no \.jsonl, \.tsv or \.parquet file"):
        load_benchmarks(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(EvaluationError, match="the benchmark is empty"):
        load_benchmarks(tmp_path / "empty.jsonl")


def _png(color: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (8, 8), (color, 0, 0)).save(file, "PNG")
    return file.getvalue()


def _base64(color: int) -> str:
    return base64.b64encode(_png(color)).decode()


def _write_tsv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t")
        writer.writeheader()
        writer.writerows(rows)
    return path


def _load(path, **options):
    (benchmark,) = load_benchmarks(path, **options)
    return benchmark


def _mmbench(tmp_path, **changes):
    row = {"index": 1, "image": _base64(1), "question": "What\nis it?", "hint": "", "A": "cat", "B": "dog", "C": ""}
    row |= {"answer": "B", "category": "identity", "l2-category": "perception"}
    rolled = row | {"index": 1000001, "image": "1", "A": "dog", "B": "cat", "answer": "A", "hint": "Look."}
    return _write_tsv(tmp_path / "MMBench_DEV_EN.tsv", [row, rolled | changes])


def test_a_tsv_of_vlmevalkit_becomes_items_with_its_prompts(tmp_path):
    benchmark = _load(_mmbench(tmp_path))
    first, rolled = benchmark.items
    assert benchmark.kind is not None
    assert find_metric(benchmark.kind).name == "mmbench"
    assert first.question == (
        "<image>Question: What\nis it?\nOptions:\nA. cat\nB. dog\nPlease select the correct answer from the options above. \n"
    )
    assert rolled.question.startswith("<image>Hint: Look.\nQuestion: What")
    assert first.images[0].read_bytes() == rolled.images[0].read_bytes() == _png(1)
    assert score(first.metric, "(B)", first.references, **first.options) == 1.0
    assert rolled.fields == {"index": "1000001", "category": "identity", "l2-category": "perception"}
    assert "scored as MMBench_DEV_EN (mmbench), because of the name 'MMBench_DEV_EN'" in benchmark.notes[0]


def test_lmms_eval_asks_for_the_letter_directly(tmp_path):
    first = _load(_mmbench(tmp_path), compat="lmms-eval").items[0]
    assert first.question == (
        "<image>What\nis it? There are several options:\nA. cat\nB. dog\n"
        "Answer with the option's letter from the given choices directly."
    )


def test_every_problem_of_a_tsv_is_listed_with_its_line(tmp_path):
    row = {"index": 1, "image": _base64(1), "question": "q", "answer": "a"}
    rows = [
        row,  # line 2
        row | {"index": 2, "question": "two\nlines", "image": "!" * 80},  # lines 3 and 4
        row | {"index": 3, "answer": ""},
        row | {"index": 1},
        row | {"index": 5, "image": "77"},
        row | {"index": 6, "question": ""},
    ]
    path = _write_tsv(tmp_path / "DocVQA_VAL.tsv", rows)
    with pytest.raises(EvaluationError) as caught:
        load_benchmarks(path)
    problems = caught.value.problems
    assert [problem.removeprefix(str(path)).split(": ")[0] for problem in problems] == [":3", ":5", ":6", ":7", ":8"]
    for problem, words in zip(
        problems,
        ("not valid base64", "answer is empty", "also that of", "not the index of a row", "question is empty"),
        strict=True,
    ):
        assert words in problem


def test_images_may_be_lists_or_files_beside_the_table(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(_png(3))
    listed = str([_base64(1), _base64(2)])
    row = {"index": 1, "image": listed, "image_path": "", "question": "Compare <image 2> with <image 1>.", "A": "x"}
    row |= {"B": "y", "answer": "A"}
    benchmark = _load(_write_tsv(tmp_path / "MMMU_DEV_VAL.tsv", [row]))
    assert benchmark.items[0].question.startswith("Question: Compare <image> with <image>.")
    assert [image.read_bytes() for image in benchmark.items[0].images] == [_png(2), _png(1)]
    named = {
        "index": 1,
        "image_path": "a.png",
        "question": "read",
        "answer": "['stop', 'halt']",
        "category": "Doc-oriented VQA",
    }
    item = _load(_write_tsv(tmp_path / "OCRBench.tsv", [named])).items[0]
    assert item.images == (tmp_path / "images" / "a.png",)
    assert score(item.metric, "HALT", item.references, **item.options) == 1.0
    assert item.question == "<image>read"


def test_rows_without_an_image_are_omitted_and_counted(tmp_path):
    row = {"index": "VD_a_1_1_1_0", "image": _base64(1), "question": "q?", "answer": "Yes", "category": "VD"}
    path = _write_tsv(tmp_path / "HallusionBench.tsv", [row, row | {"index": "VS_a_0_1_0_0", "image": ""}])
    benchmark = _load(path)
    assert len(benchmark.items) == 1
    assert "1 rows without an image are omitted" in benchmark.notes[1]


def test_columns_that_are_missing_are_named(tmp_path):
    path = _write_tsv(tmp_path / "ChartQA_TEST.tsv", [{"index": 1, "query_text": "q", "image": _base64(1)}])
    with pytest.raises(
        EvaluationError, match=r"no column for a question \(.*\) and an answer \(.*its columns are index"
    ):
        load_benchmarks(path)


def test_a_row_with_too_many_cells_is_named(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text("index\tquestion\tanswer\n1\ta\tb\tc\n")
    with pytest.raises(EvaluationError, match=r"x\.tsv:2: has 4 cells for 3 columns"):
        load_benchmarks(path)


def _write_parquet(path, rows):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def _struct(color):
    return {"bytes": _png(color), "path": "x.png"}


def test_shards_of_a_data_set_are_one_benchmark_named_after_its_directory(tmp_path):
    for number, name in enumerate(("test-00000-of-00002", "test-00001-of-00002")):
        rows = [
            {"question_id": f"{number}.png", "image": _struct(number), "question": q, "answer": a, "category": "count"}
            for q, a in (("two? Please answer yes or no.", "Yes"), ("three? Please answer yes or no.", "No"))
        ]
        _write_parquet(tmp_path / "MME" / "data" / f"{name}.parquet", rows)
    benchmark = _load(tmp_path / "MME")
    assert (benchmark.name, benchmark.kind, len(benchmark.items)) == ("MME_test", "MME", 4)
    assert [item.fields["image"] for item in benchmark.items] == ["0.png", "0.png", "1.png", "1.png"]
    assert benchmark.items[0].question == "<image>two? Please answer yes or no."
    lmms = _load(tmp_path / "MME", compat="lmms-eval").items[0]
    assert lmms.question == "<image>two?\nAnswer the question using a single word or phrase."


def _only(tmp_path, name, row, **options) -> Item:
    return _load(_write_parquet(tmp_path / f"{name}.parquet", [row]), **options).items[0]


def test_the_layouts_of_lmms_eval_are_understood(tmp_path):
    doc = {"questionId": "7", "question": "where?", "image": _struct(1), "answers": ["Paris", "paris"]}
    item = _only(tmp_path, "docvqa", doc)
    assert (item.id, item.references) == ("7", ["Paris", "paris"])
    assert item.question == "<image>where?\nAnswer the question using a single word or phrase."
    diagram = {"question": "which?", "options": ["cat", "dog"], "answer": "1", "image": _struct(1)}
    assert _only(tmp_path, "ai2d", diagram).references == "B"
    math = {
        "pid": "1",
        "question": "q",
        "query": "Hint: x\nQuestion: q",
        "image": "images/1.jpg",
        "choices": ["4", "9"],
    }
    math |= {"decoded_image": _struct(2), "answer": "9", "question_type": "multi_choice", "answer_type": "text"}
    math |= {"precision": None, "metadata": {"skills": ["algebra"], "task": "geometry"}}
    item = _only(tmp_path, "testmini", math)  # found by its columns
    assert item.question == "<image>Hint: x\nQuestion: q"
    assert item.fields == {"skills": ["algebra"], "task": "geometry"}
    assert score(item.metric, "B", item.references, **item.options) == 1.0
    pro = {
        "id": "v",
        "question": "See <image 1>",
        "options": "['a', 'b']",
        "answer": "B",
        "image_1": _struct(3),
        "image_2": None,
    }
    item = _only(tmp_path, "mmmu_pro_standard", pro)
    assert item.question == (
        "Question: See <image>\nOptions:\nA. a\nB. b\nAnswer directly with the option letter from the given choices. "
    )
    vision = {"id": "v", "image": _struct(3), "options": "['a', 'b']", "answer": "B"}
    assert _only(tmp_path, "MMMU_Pro_V", vision).question.startswith("<image>Answer the following multiple-choice")


def test_text_benchmarks_have_no_images(tmp_path):
    gpqa = {
        "Question": "q",
        "Correct Answer": "r",
        "Incorrect Answer 1": "x",
        "Incorrect Answer 2": "y",
        "Incorrect Answer 3": "z",
    }
    item = _only(tmp_path, "gpqa_diamond", gpqa)
    assert item.options["choices"][item.references] == "r"
    assert sorted(item.options["choices"].values()) == ["r", "x", "y", "z"]
    instructions = {"key": 1, "prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"n": 1}]}
    item = _only(tmp_path, "train", instructions)
    assert (item.metric, item.question, item.references) == ("ifeval", "Write.", None)
    assert item.options["prompt"] == "Write."
    assert _only(tmp_path, "aime24", {"problem": "1+1", "answer": "2"}).question == "1+1"
    assert _only(tmp_path, "AIME_2024", {"ID": "I-1", "Problem": "1+1", "Answer": 2}).references == "2"


def test_a_kind_may_be_given(tmp_path):
    path = _write_tsv(tmp_path / "mine.tsv", [{"index": 1, "question": "q", "answer": "100"}])
    assert _load(path).items[0].metric == "exact_match"
    assert _load(path, kind="chartqa").items[0].metric == "relaxed_accuracy"
    with pytest.raises(EvaluationError, match="metric: 'chart' is unknown"):
        load_benchmarks(path, kind="chart")


def test_a_line_of_jsonl_may_name_its_metric(tmp_path):
    path = tmp_path / "own.jsonl"
    rows = [
        {"question": "1", "answer": ["a", "b"], "metric": "anls", "threshold": 0.9},
        {"question": "2", "answer": "B", "metric": "mcq", "choices": ["x", "y"]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = _load(path).items
    assert (first.references, dict(first.options)) == (["a", "b"], {"threshold": 0.9})
    assert score(second.metric, "y", second.references, **second.options) == 1.0
    path.write_text('{"question": "1", "answer": "a", "metric": "anl"}\n{"question": "1"}\n')
    with pytest.raises(EvaluationError) as caught:
        load_benchmarks(path)
    assert len(caught.value.problems) == 2


def test_files_are_recognized_by_content(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text('{"question": "q"}\n')
    assert recognize(path) == ("jsonl", "the first line is a JSON object")
    path.write_text("index\tquestion\n")
    assert recognize(path)[0] == "tsv"
    path.write_bytes(b"\x89PNG....")
    with pytest.raises(EvaluationError, match="is neither parquet"):
        recognize(path)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1" + b"x" * 50)
    with pytest.raises(EvaluationError, match=r"bad\.parquet: cannot be read as parquet"):
        load_benchmarks(tmp_path / "bad.parquet")


ARENA = {
    "v0.1": (
        {"question_id": "q1", "category": "arena-hard-v0.1", "cluster": "c", "turns": [{"content": "Write <image>."}]},
        {
            "question_id": "q1",
            "model_id": "m",
            "choices": [{"index": 0, "turns": [{"content": "base", "token_len": 1}]}],
        },
    ),
    "v2.0": (
        {"uid": "q1", "category": "hard_prompt", "subcategory": "coding", "prompt": "Write <image>."},
        {
            "uid": "q1",
            "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": {"answer": "base"}}],
        },
    ),
}


@pytest.mark.parametrize("version", ARENA)
def test_questions_of_arena_hard_are_joined_with_the_replies_of_the_baseline(version, tmp_path):
    question, reply = ARENA[version]
    (tmp_path / "question.jsonl").write_text(json.dumps(question) + "\n")
    (tmp_path / "gpt.jsonl").write_text(json.dumps(reply) + "\n")
    (benchmark,) = load_benchmarks(tmp_path / "question.jsonl", baseline=tmp_path / "gpt.jsonl")
    (item,) = benchmark.items
    assert (benchmark.kind, item.id, item.metric, item.references) == ("arena_hard", "q1", "arena_hard", "base")
    assert item.options["question"] == "Write <image>."
    assert IMAGE_MARK not in item.question  # the text names no image


def test_arena_hard_without_a_baseline_or_a_reply_is_refused(tmp_path):
    question, reply = ARENA["v0.1"]
    path, baseline = tmp_path / "question.jsonl", tmp_path / "gpt.jsonl"
    path.write_text(
        json.dumps(question) + "\n" + json.dumps(question) + "\n" + json.dumps({**question, "question_id": "q2"})
    )
    with pytest.raises(EvaluationError, match="Give its replies with --baseline FILE"):
        load_benchmarks(path)
    baseline.write_text(json.dumps(reply) + "\n{}\nno json")
    with pytest.raises(EvaluationError) as caught:
        load_benchmarks(path, baseline=baseline)
    expected = [
        "is not a reply of Arena",
        "is not valid JSON",
        "id 'q1' is used twice",
        f"{baseline} has no reply to 'q2'",
    ]
    for problem, text in zip(caught.value.problems, expected, strict=True):
        assert text in problem
