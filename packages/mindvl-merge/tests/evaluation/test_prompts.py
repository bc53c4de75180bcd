# SPDX-License-Identifier: Apache-2.0
"""Prompts of the benchmarks, written out as the projects build them, and the places of images in a text."""

import pytest

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.prompts import as_hint, build_prompt, place_images

CHOICES = {"A": "cat", "B": "dog"}
SHORT = "q\nAnswer the question using a single word or phrase."
LETTER = "Answer with the option's letter from the given choices directly."
OPTIONS = "Options:\nA. cat\nB. dog\nPlease select the correct answer from the options above. \n"


@pytest.mark.parametrize(
    ("metric", "choices", "hint", "vlmevalkit", "lmms"),
    [
        ("anls", {}, None, SHORT, SHORT),
        ("relaxed_accuracy", {}, None, SHORT, SHORT),
        ("ocrbench", {}, None, "q", "q"),
        ("yes_no", {}, None, "q", SHORT),
        ("mathvista", CHOICES, None, "q", "q"),
        ("ai2d", CHOICES, None, f"Question: q\n{OPTIONS}", f"q\nA. cat\nB. dog\n{LETTER}"),
        (
            "mmbench",
            CHOICES,
            "h",
            f"Hint: h\nQuestion: q\n{OPTIONS}",
            f"h q There are several options:\nA. cat\nB. dog\n{LETTER}",
        ),
    ],
)
def test_the_prompt_of_a_benchmark(metric, choices, hint, vlmevalkit, lmms):
    assert build_prompt(metric, "q", choices, hint, "vlmevalkit") == vlmevalkit
    assert build_prompt(metric, "q", choices, hint, "strict") == vlmevalkit
    assert build_prompt(metric, "q", choices, hint, "lmms-eval") == lmms


def test_mmmu_pro_asks_for_reasoning_on_request():
    prompt = build_prompt("mmmu_pro", "q", CHOICES, None, "vlmevalkit", cot=True)
    assert prompt.startswith("Question: q\nOptions:\nA. cat\nB. dog\nAnswer the following multiple-choice question. ")
    assert "'Answer: $LETTER'" in prompt


def test_images_come_first_or_where_their_number_stands():
    assert place_images("text", 2, "f:1") == ("<image><image>text", (0, 1))
    assert place_images("a <image> b", 1, "f:1") == ("a <image> b", (0,))
    assert place_images("see <image 2> and <image 2>", 2, "f:1") == ("see <image> and <image>", (1, 1))
    assert place_images("write <image> tags", 0, "f:1") == ("write  tags", ())
    with pytest.raises(EvaluationError, match=r"f:1: question shows image 3 of 2"):
        place_images("see <image 3>", 2, "f:1")


def test_a_hint_may_be_missing_in_several_ways():
    assert [as_hint(value) for value in (None, float("nan"), "", "nan", " h ")] == [None, None, None, None, "h"]
