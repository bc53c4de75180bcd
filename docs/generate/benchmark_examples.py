# SPDX-License-Identifier: Apache-2.0
"""One example for each kind of benchmark file.

Comes before formats.py, which writes the files and makes the page. A test compares each question with the one that the code asks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data_examples import ASKED, IMAGE


@dataclass(frozen=True, kw_only=True)
class BenchmarkExample:
    """A benchmark file, and the first question that `mindvl eval` makes of it."""

    title: str
    files: Mapping[str, Any]
    source: str
    metric: str | None  # None: the score kind of each line
    question: str
    references: Any
    baseline: str | None = None
    note: str = ""


_IMAGE_BYTES = {"bytes": IMAGE, "path": None}

BENCHMARKS: tuple[BenchmarkExample, ...] = (
    BenchmarkExample(
        title="JSON lines of your own",
        files={"read.jsonl": [{"images": ["1.png"], "question": f"<image>{ASKED}", "answer": "4071"}], "1.png": IMAGE},
        source="read.jsonl",
        metric=None,
        question="<image>What is written?",
        references="4071",
        note="[Evaluate](../guides/evaluate.md#benchmark-files) describes all fields.",
    ),
    BenchmarkExample(
        title="JSON lines with a metric",
        files={
            "capitals.jsonl": [
                {"question": "Which city?", "answer": ["Paris", "City of Paris"], "metric": "anls", "threshold": 0.9}
            ]
        },
        source="capitals.jsonl",
        metric="anls",
        question="Which city?",
        references=["Paris", "City of Paris"],
    ),
    BenchmarkExample(
        title="JSON lines with boxes",
        files={
            "find.jsonl": [
                {"images": ["1.png"], "question": "<image>Where?", "answer": "", "score": "box", "box": [4, 8, 20, 24]}
            ],
            "1.png": IMAGE,
        },
        source="find.jsonl",
        metric=None,
        question="<image>Where?",
        references="",
    ),
    BenchmarkExample(
        title="Multiple choice, VLMEvalKit",
        files={
            "MMBench_DEV_EN.tsv": [
                {
                    "index": "1",
                    "image": IMAGE,
                    "question": "Which color?",
                    "hint": "Look.",
                    "A": "red",
                    "B": "blue",
                    "answer": "A",
                    "category": "color",
                }
            ]
        },
        source="MMBench_DEV_EN.tsv",
        metric="mmbench",
        question="<image>Hint: Look.\nQuestion: Which color?\nOptions:\nA. red\nB. blue\nPlease select the correct answer from "
        "the options above. \n",
        references="A",
        note="The same columns are those of MMStar, RealWorldQA, AI2D, ScienceQA and others.",
    ),
    BenchmarkExample(
        title="Short answers, VLMEvalKit",
        files={"ChartQA_TEST.tsv": [{"index": "1", "image": IMAGE, "question": "How many?", "answer": "12"}]},
        source="ChartQA_TEST.tsv",
        metric="relaxed_accuracy",
        question="<image>How many?\nAnswer the question using a single word or phrase.",
        references="12",
        note="The same columns are those of DocVQA, InfoVQA, TextVQA, OCRVQA and OCRBench (with `category`).",
    ),
    BenchmarkExample(
        title="Yes or no, VLMEvalKit",
        files={
            "MME.tsv": [
                {"index": "0", "image_path": "1.png", "question": "Is it red?", "answer": "Yes", "category": "color"}
            ],
            "1.png": IMAGE,
        },
        source="MME.tsv",
        metric="yes_no",
        question="<image>Is it red?",
        references="Yes",
        note="POPE has the same columns.",
    ),
    BenchmarkExample(
        title="HallusionBench",
        files={
            "HallusionBench.tsv": [
                {
                    "index": "0",
                    "image": IMAGE,
                    "question": "Is it red?",
                    "answer": "Yes",
                    "category": "VD",
                    "l2-category": "figure",
                    "set_id": "0",
                    "figure_id": "1",
                    "question_id": "0",
                }
            ]
        },
        source="HallusionBench.tsv",
        metric="hallusionbench",
        question="<image>Is it red?",
        references="Yes",
    ),
    BenchmarkExample(
        title="Short answers, lmms-eval",
        files={
            "docvqa/validation.parquet": [
                {"questionId": "7", "question": "Which city?", "image": _IMAGE_BYTES, "answers": ["Paris", "paris"]}
            ]
        },
        source="docvqa",
        metric="anls",
        question="<image>Which city?\nAnswer the question using a single word or phrase.",
        references=["Paris", "paris"],
    ),
    BenchmarkExample(
        title="Multiple choice, lmms-eval",
        files={
            "ai2d.parquet": [{"question": "Which?", "options": ["cat", "dog"], "answer": "1", "image": _IMAGE_BYTES}]
        },
        source="ai2d.parquet",
        metric="ai2d",
        question="<image>Question: Which?\nOptions:\nA. cat\nB. dog\nPlease select the correct answer from "
        "the options above. \n",
        references="B",
    ),
    BenchmarkExample(
        title="MMMU and MMMU-Pro",
        files={
            "mmmu_pro_standard.parquet": [
                {
                    "id": "v",
                    "question": "See <image 1>",
                    "options": "['a', 'b']",
                    "answer": "B",
                    "image_1": _IMAGE_BYTES,
                }
            ]
        },
        source="mmmu_pro_standard.parquet",
        metric="mmmu_pro",
        question="Question: See <image>\nOptions:\nA. a\nB. b\nAnswer directly with the option letter from the given choices. ",
        references="B",
    ),
    BenchmarkExample(
        title="MathVista",
        files={
            "testmini.parquet": [
                {
                    "pid": "1",
                    "query": "Hint: Write a number.\nQuestion: 2 + 2?",
                    "question": "2 + 2?",
                    "answer": "4",
                    "decoded_image": _IMAGE_BYTES,
                    "question_type": "free_form",
                    "answer_type": "integer",
                    "precision": 0.0,
                    "metadata": {"skills": ["arithmetic reasoning"], "task": "math word problem"},
                }
            ]
        },
        source="testmini.parquet",
        metric="mathvista",
        question="<image>Hint: Write a number.\nQuestion: 2 + 2?",
        references="4",
    ),
    BenchmarkExample(
        title="MM-Vet",
        files={
            "mm-vet.parquet": [
                {
                    "question_id": "v1",
                    "question": "What is shown?",
                    "answer": "a red square",
                    "image": _IMAGE_BYTES,
                    "capability": "rec",
                }
            ]
        },
        source="mm-vet.parquet",
        metric="mmvet",
        question="<image>What is shown?",
        references="a red square",
        note="It needs a judge.",
    ),
    BenchmarkExample(
        title="GPQA",
        files={
            "gpqa_diamond.parquet": [
                {
                    "Question": "Which?",
                    "Correct Answer": "right",
                    "Incorrect Answer 1": "x",
                    "Incorrect Answer 2": "y",
                    "Incorrect Answer 3": "z",
                }
            ]
        },
        source="gpqa_diamond.parquet",
        metric="gpqa",
        question="Question: Which?\nOptions:\nA. x\nB. y\nC. right\nD. z\nPlease select the correct answer from "
        "the options above. \n",
        references="C",
        note="The order of the options depends on the question and their texts only.",
    ),
    BenchmarkExample(
        title="AIME",
        files={"AIME_2024.parquet": [{"ID": "I-1", "Problem": "1 + 1?", "Answer": 2}]},
        source="AIME_2024.parquet",
        metric="aime",
        question="1 + 1?",
        references="2",
    ),
    BenchmarkExample(
        title="IFEval",
        files={
            "train.parquet": [
                {
                    "key": 1,
                    "prompt": "Write without commas.",
                    "instruction_id_list": ["punctuation:no_comma"],
                    "kwargs": [{"n": None}],
                }
            ]
        },
        source="train.parquet",
        metric="ifeval",
        question="Write without commas.",
        references=None,
    ),
    BenchmarkExample(
        title="Arena-Hard",
        files={
            "question.jsonl": [
                {"question_id": "q1", "category": "arena-hard-v0.1", "cluster": "c", "turns": [{"content": "Write."}]}
            ],
            "gpt-4-0314.jsonl": [{"question_id": "q1", "choices": [{"turns": [{"content": "A reply."}]}]}],
        },
        source="question.jsonl",
        metric="arena_hard",
        question="Write.",
        references="A reply.",
        baseline="gpt-4-0314.jsonl",
        note="The replies of the baseline model are named with `--baseline`.",
    ),
)
