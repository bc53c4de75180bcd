# SPDX-License-Identifier: Apache-2.0
"""Questions about images of numbers: training sources in LLaVA format and benchmark files.

Comes after pages.py; `mindvl data write --format llava` reads the sources. A sample depends only on (seed, index).
Benchmarks use held-out scans, and held-out numbers from three digits on.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from mindvl_cli.demo.digits import Split, load_scans
from mindvl_cli.demo.pages import Box, Layout, Page, compose_page, key_split, page_generator, random_number
from mindvl_cli.whole_file import write_whole

Task = Literal["digit", "caption", "read", "read3", "count", "compare", "locate", "arithmetic", "copy", "document"]
ScoreKind = Literal["exact", "anls", "point", "box"]

IMAGE_MARK = "<image>"
BENCHMARK_TASKS: tuple[Task, ...] = ("read", "count", "compare", "locate", "arithmetic", "copy")

_JPEG_QUALITY = 95
_MAX_DIGITS = 6
_LEAST_OF_DOCUMENT, _MOST_OF_DOCUMENT = 4, 8
_LARGEST_OPERAND = 20
_LAYOUT_SHARES: Mapping[Layout, float] = {"line": 0.64, "two_lines": 0.16, "small": 0.12, "large": 0.08}

_CAPTION_QUESTION, _CAPTION_ANSWER = "Describe it.", "The number is {}."
_READ_QUESTIONS = ("Which number is this?", "Read the number.", "What number do you see?")
_DOCUMENT_QUESTIONS = ("Read all lines.", "Write all digits of the page.")
_COUNT_QUESTIONS = ("How many digits are there?", "Count the digits.")
_COMPARE_QUESTIONS = (
    "A: <image> B: <image> Which number is larger?",
    "Here is A: <image> and here is B: <image> Where is the larger number?",
)
_POINT_QUESTIONS = ("Point to the {}.", "Where is the {}?")
_BOX_QUESTIONS = ("Give the box of the {}.", "Draw a box around the {}.")
_COPY_QUESTIONS = ("Copy it.", *_READ_QUESTIONS)
_COPY_GAPS = ("", " ", " .", "..")  # text between digits; in images, too, digits have gaps


@dataclass(frozen=True, kw_only=True)
class Example:
    """One question with its pages; `<image>`, `<box:0>` and `<point:0>` are placeholders in the texts."""

    task: Task
    question: str
    answer: str
    pages: tuple[Page, ...] = ()
    boxes: tuple[Box, ...] = ()  # pixels of the only page
    points: tuple[tuple[int, int], ...] = ()
    score: ScoreKind = "exact"


def make_example(task: Task, *, split: Split, seed: int, index: int) -> Example:
    """Make example `index` of a task; the same arguments give the same example, pixel for pixel."""
    return _MAKERS[task](split, page_generator(seed, index))


def write_source(
    directory: Path,
    *,
    shares: Mapping[Task, float],
    num_samples: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Write one training source: `data.json` and, unless it is text only, `images/`.

    Args:
        shares: Weight of each task in the source; assigned by largest deficit, so the counts are exact.
        progress: Called with the number of samples written since the last call.

    Returns:
        The path of `data.json`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    records = []
    for index, task in enumerate(assign_tasks(shares, num_samples)):
        example = make_example(task, split="train", seed=seed, index=index)
        records.append(_llava_record(example, directory=directory, key=f"{index:06d}"))
        if progress is not None:
            progress(1)
    path = directory / "data.json"
    write_whole(path, json.dumps(records))
    return path


def write_benchmark(directory: Path, *, task: Task, split: Split, num_samples: int, seed: int) -> Path:
    """Write one benchmark, `TASK.jsonl` and its images in `images/`, from the scans and numbers of a held-out split.

    Lines hold id, task, images (paths relative to `directory`), question, answer, score or metric and, for locate, box:
    the true box in pixels of the image file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(num_samples):
        example = make_example(task, split=split, seed=seed, index=index)
        key = f"{task}-{index:05d}"
        row: dict[str, Any] = {"id": key, "task": task, "images": _write_pages(example, directory=directory, key=key)}
        row |= {"question": example.question, "answer": example.answer}
        row |= {"metric": "anls"} if example.score == "anls" else {"score": example.score}
        if example.score in ("point", "box"):
            row["box"] = list(example.boxes[0])
        rows.append(json.dumps(row))
    path = directory / f"{task}.jsonl"
    write_whole(path, "\n".join(rows) + "\n")
    return path


def assign_tasks(shares: Mapping[Task, float], num_samples: int) -> Iterator[Task]:
    """Yield `num_samples` tasks whose counts keep to the shares at every prefix (largest deficit first)."""
    total = sum(shares.values())
    given = dict.fromkeys(shares, 0)
    for position in range(1, num_samples + 1):
        task = max(shares, key=lambda name: shares[name] / total * position - given[name])
        given[task] += 1
        yield task


def sample_texts(*, num_samples: int, seed: int) -> list[str]:
    """Questions and answers of all tasks without image placeholders; training text of the tokenizer."""
    tasks: tuple[Task, ...] = ("caption", *BENCHMARK_TASKS)
    texts = []
    for index in range(num_samples):
        example = make_example(tasks[index % len(tasks)], split="train", seed=seed, index=index)
        texts.append(example.question.replace(IMAGE_MARK, ""))
        texts.append(example.answer)
    return texts


def _digit(split: Split, generator: np.random.Generator) -> Example:
    page = _page(split, generator, num_digits=1, layout="digit")
    return Example(task="digit", question=IMAGE_MARK, answer=page.number, pages=(page,))


def _caption(split: Split, generator: np.random.Generator) -> Example:
    page = _page(split, generator)
    question = f"{IMAGE_MARK}\n{_CAPTION_QUESTION}"
    return Example(task="caption", question=question, answer=_CAPTION_ANSWER.format(page.number), pages=(page,))


def _read(split: Split, generator: np.random.Generator) -> Example:
    page = _page(split, generator)
    question = f"{IMAGE_MARK}\n{_choose(_READ_QUESTIONS, generator)}"
    return Example(task="read", question=question, answer=page.number, pages=(page,))


def _read3(split: Split, generator: np.random.Generator) -> Example:
    """The task of the headline: three digits, always in one line, where `read` has any number of digits in every layout."""
    page = _page(split, generator, num_digits=3, layout="line")
    question = f"{IMAGE_MARK}\n{_choose(_READ_QUESTIONS, generator)}"
    return Example(task="read3", question=question, answer=page.number, pages=(page,))


def _document(split: Split, generator: np.random.Generator) -> Example:
    """The task of the study: more digits on larger images than `read`, so that resolution matters and answers are long."""
    num_digits = int(generator.integers(_LEAST_OF_DOCUMENT, _MOST_OF_DOCUMENT + 1))
    page = _page(split, generator, num_digits=num_digits, layout="document")
    question = f"{IMAGE_MARK}\n{_choose(_DOCUMENT_QUESTIONS, generator)}"
    return Example(task="document", question=question, answer=page.number, pages=(page,), score="anls")


def _count(split: Split, generator: np.random.Generator) -> Example:
    page = _page(split, generator)
    question = f"{IMAGE_MARK}\n{_choose(_COUNT_QUESTIONS, generator)}"
    return Example(task="count", question=question, answer=str(len(page.number)), pages=(page,))


def _compare(split: Split, generator: np.random.Generator) -> Example:
    first, second = (_page(split, generator, num_digits=_num_digits(generator, 3), layout="line") for _ in range(2))
    while first.number == second.number:
        second = _page(split, generator, num_digits=_num_digits(generator, 3), layout="line")
    answer = "A" if int(first.number) > int(second.number) else "B"
    question = _choose(_COMPARE_QUESTIONS, generator)
    return Example(task="compare", question=question, answer=answer, pages=(first, second))


def _locate(split: Split, generator: np.random.Generator) -> Example:
    page = _page(split, generator)
    alone = [place for place, digit in enumerate(page.number) if page.number.count(digit) == 1]
    while not alone:
        page = _page(split, generator)
        alone = [place for place, digit in enumerate(page.number) if page.number.count(digit) == 1]
    place = alone[int(generator.integers(len(alone)))]
    left, top, right, bottom = box = page.boxes[place]
    if generator.uniform() < 0.5:
        questions, answer, score = _POINT_QUESTIONS, "<point:0>", "point"
    else:
        questions, answer, score = _BOX_QUESTIONS, "<box:0>", "box"
    return Example(
        task="locate",
        question=f"{IMAGE_MARK}\n{_choose(questions, generator).format(page.number[place])}",
        answer=answer,
        pages=(page,),
        boxes=(box,),
        points=(((left + right) // 2, (top + bottom) // 2),),
        score="point" if score == "point" else "box",
    )


def _arithmetic(split: Split, generator: np.random.Generator) -> Example:
    while True:
        first, second = (int(generator.integers(1, _LARGEST_OPERAND + 1)) for _ in range(2))
        plus = generator.uniform() < 0.5
        if not plus:
            first, second = max(first, second), min(first, second)
        question = f"{first} {'+' if plus else '-'} {second} ="
        if key_split(question) == split:
            return Example(task="arithmetic", question=question, answer=str(first + second if plus else first - second))


def _copy(split: Split, generator: np.random.Generator) -> Example:
    number = random_number(generator, num_digits=_num_digits(generator, _MAX_DIGITS), split=split)
    shown = number
    if generator.uniform() < 0.7:
        shown = "".join(_choose(_COPY_GAPS, generator) * int(generator.integers(1, 3)) + digit for digit in number)
    if generator.uniform() < 0.25:
        question, answer = _CAPTION_QUESTION, _CAPTION_ANSWER.format(number)
    else:
        question, answer = _choose(_COPY_QUESTIONS, generator), number
    return Example(task="copy", question=f"{shown}\n{question}", answer=answer)


_MAKERS: dict[Task, Callable[[Split, np.random.Generator], Example]] = {
    "digit": _digit,
    "caption": _caption,
    "read": _read,
    "read3": _read3,
    "document": _document,
    "count": _count,
    "compare": _compare,
    "locate": _locate,
    "arithmetic": _arithmetic,
    "copy": _copy,
}


def _page(
    split: Split, generator: np.random.Generator, *, num_digits: int | None = None, layout: Layout | None = None
) -> Page:
    if num_digits is None:
        num_digits = _num_digits(generator, _MAX_DIGITS)
    if layout is None:
        layouts = tuple(_LAYOUT_SHARES)
        layout = layouts[int(generator.choice(len(layouts), p=tuple(_LAYOUT_SHARES.values())))]
    number = random_number(generator, num_digits=num_digits, split=split)
    return compose_page(number, scans=load_scans(split), layout=layout, generator=generator)


def _num_digits(generator: np.random.Generator, most: int) -> int:
    return int(generator.integers(1, most + 1))


def _choose(texts: tuple[str, ...], generator: np.random.Generator) -> str:
    return texts[int(generator.integers(len(texts)))]


def _llava_record(example: Example, *, directory: Path, key: str) -> dict[str, Any]:
    record: dict[str, Any] = {"id": key}
    images = _write_pages(example, directory=directory, key=key)
    if images:
        record["image"] = images[0] if len(images) == 1 else images
    record["conversations"] = [
        {"from": "human", "value": example.question},
        {"from": "gpt", "value": example.answer},
    ]
    if "<box:" in example.answer:
        record["boxes"] = [list(box) for box in example.boxes]
    if "<point:" in example.answer:
        record["points"] = [list(point) for point in example.points]
    return record


def _write_pages(example: Example, *, directory: Path, key: str) -> list[str]:
    """Write the pages of one example; returns their paths relative to `directory`."""
    paths = []
    for number, page in enumerate(example.pages):
        path = f"images/{key}-{number}.jpg"
        (directory / "images").mkdir(exist_ok=True)
        Image.fromarray(page.image).save(directory / path, format="JPEG", quality=_JPEG_QUALITY)
        paths.append(path)
    return paths
