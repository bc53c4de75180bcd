# SPDX-License-Identifier: Apache-2.0
"""Examples are right, and the files say what the examples say."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindvl_cli.demo.digits import Split
from mindvl_cli.demo.pages import number_split
from mindvl_cli.demo.tasks import (
    BENCHMARK_TASKS,
    IMAGE_MARK,
    Task,
    assign_tasks,
    make_example,
    sample_texts,
    write_benchmark,
    write_source,
)


@pytest.mark.parametrize("task", [*BENCHMARK_TASKS, "digit", "caption", "read3"])
def test_a_question_has_one_placeholder_for_each_page(task: Task) -> None:
    for index in range(10):
        example = make_example(task, split="train", seed=1, index=index)
        assert example.question.count(IMAGE_MARK) == len(example.pages)


@pytest.mark.parametrize("task", ["read", "compare", "locate"])
def test_the_same_index_gives_the_same_example(task: Task) -> None:
    first, second = (make_example(task, split="test", seed=2, index=7) for _ in range(2))
    assert (first.question, first.answer, first.boxes) == (second.question, second.answer, second.boxes)
    for one, other in zip(first.pages, second.pages, strict=True):
        assert np.array_equal(one.image, other.image)


def test_compare_names_the_page_with_the_larger_number() -> None:
    for index in range(30):
        example = make_example("compare", split="train", seed=3, index=index)
        first, second = (int(page.number) for page in example.pages)
        assert example.answer == ("A" if first > second else "B")


def test_locate_asks_for_a_digit_that_occurs_once() -> None:
    for index in range(30):
        example = make_example("locate", split="train", seed=4, index=index)
        page = example.pages[0]
        asked = [digit for digit in example.question if digit.isdigit()]
        assert len(asked) == 1
        assert page.number.count(asked[0]) == 1
        assert example.boxes == (page.boxes[page.number.index(asked[0])],)
        (left, top, right, bottom), (x, y) = example.boxes[0], example.points[0]
        assert left <= x < right
        assert top <= y < bottom


def test_arithmetic_is_right_and_keeps_test_questions_back() -> None:
    asked: dict[Split, set[str]] = {"train": set(), "test": set()}
    for split, questions in asked.items():
        for index in range(300):
            example = make_example("arithmetic", split=split, seed=5, index=index)
            first, sign, second, _ = example.question.split()
            assert int(example.answer) == (int(first) + int(second) if sign == "+" else int(first) - int(second))
            questions.add(example.question)
    assert not asked["train"] & asked["test"]


def test_test_reading_uses_unseen_three_digit_numbers() -> None:
    for index in range(50):
        number = make_example("read3", split="test", seed=6, index=index).answer
        assert len(number) == 3
        assert number_split(number) == "test"


def test_tasks_are_distributed_by_exact_shares() -> None:
    assigned = list(assign_tasks({"read": 3, "count": 1}, 40))
    assert assigned.count("read") == 30
    assert assigned[:4].count("count") == 1


def test_a_source_is_written_in_llava_style(tmp_path: Path) -> None:
    path = write_source(tmp_path / "mixed", shares={"read": 1, "compare": 1, "locate": 2}, num_samples=12, seed=7)
    records = json.loads(path.read_text())
    assert len({record["id"] for record in records}) == 12
    for record in records:
        images = [record["image"]] if isinstance(record["image"], str) else record["image"]
        human, gpt = record["conversations"]
        assert (human["from"], gpt["from"]) == ("human", "gpt")
        assert human["value"].count("<image>") == len(images)
        assert ("boxes" in record) == ("<box:0>" in gpt["value"])
        assert ("points" in record) == ("<point:0>" in gpt["value"])
        for name in images:
            with Image.open(path.parent / name) as image:
                assert image.mode == "RGB"


def test_a_text_source_has_no_images(tmp_path: Path) -> None:
    path = write_source(tmp_path, shares={"arithmetic": 1, "copy": 1}, num_samples=6, seed=8)
    assert not (tmp_path / "images").exists()
    assert all("image" not in record for record in json.loads(path.read_text()))


def test_progress_hears_of_every_sample(tmp_path: Path) -> None:
    counts: list[int] = []
    write_source(tmp_path, shares={"copy": 1}, num_samples=5, seed=8, progress=counts.append)
    assert sum(counts) == 5


def test_a_benchmark_row_can_be_scored_from_the_file_alone(tmp_path: Path) -> None:
    path = write_benchmark(tmp_path, task="locate", split="validation", num_samples=8, seed=9)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.name == "locate.jsonl"
    assert len(rows) == 8
    for row in rows:
        assert row["score"] in ("point", "box")
        left, top, right, bottom = row["box"]
        with Image.open(tmp_path / row["images"][0]) as image:
            assert right <= image.width
            assert bottom <= image.height
        assert left < right
        assert top < bottom


def test_tokenizer_texts_have_no_image_placeholders() -> None:
    texts = sample_texts(num_samples=14, seed=0)
    assert len(texts) == 28
    assert all(IMAGE_MARK not in text for text in texts)
