# SPDX-License-Identifier: Apache-2.0
"""Prompts of the benchmarks, as VLMEvalKit and lmms-eval build them from the columns of a file.

Comes after the readers have found question, options and images; `strict` uses VLMEvalKit's prompts, because a prompt is
not a matter of right or wrong.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.benchmark import IMAGE_MARK
from mindvl_merge.evaluation.metrics.options import Compat

SHORT_ANSWER = "\nAnswer the question using a single word or phrase."
SELECT = "Please select the correct answer from the options above. \n"
LETTER = "Answer directly with the option letter from the given choices. "
LETTER_LMMS = "\nAnswer with the option's letter from the given choices directly."
IN_IMAGE = "Answer the following multiple-choice question in the image. "
REASON = (
    "The last line of your response should be of the following format: 'Answer: $LETTER' (without quotes) where LETTER "
    "is one of the options. Think step by step before answering. "
)

# Metrics whose questions ask for a short answer.
_SHORT = frozenset({"anls", "relaxed_accuracy", "textvqa", "vqa_accuracy", "gqa"})
_CHOICES = frozenset({"multiple_choice", "mmbench", "ai2d", "gpqa"})
_NUMBERED_MARK = re.compile(r"<image (\d)>")


def build_prompt(
    metric: str, question: str, choices: Mapping[str, str], hint: str | None, compat: Compat, *, cot: bool = False
) -> str:
    """Text of the prompt.

    Args:
        metric: Name of the metric in the registry.
        choices: Option letter -> text; empty for open questions.
        cot: Ask for reasoning before the letter (MMMU-Pro).
    """
    if metric == "mmmu_pro":
        return _mmmu(question, choices, compat, cot=cot)
    if metric in _CHOICES or (choices and metric == "exact_match"):
        return _multiple_choice(metric, question, choices, hint, compat)
    if metric in _SHORT or (metric == "exact_match" and compat != "strict"):
        return question + SHORT_ANSWER
    if metric in ("yes_no", "pope") and compat == "lmms-eval":
        return question.replace(" Please answer yes or no.", "") + SHORT_ANSWER
    return question


def place_images(text: str, num_images: int, where: str) -> tuple[str, tuple[int, ...]]:
    """Put one IMAGE_MARK into a text for each image that it shows.

    Numbered marks (`<image 1>`, as MMMU has them) show an image where they stand; otherwise all images come first.

    Returns:
        The text, and the index of the image of each mark.

    Raises:
        EvaluationError: A numbered mark has no image.
    """
    numbers = [int(number) - 1 for number in _NUMBERED_MARK.findall(text)]
    wrong = [number + 1 for number in numbers if not 0 <= number < num_images]
    if wrong:
        raise EvaluationError(f"{where}: question shows image {wrong[0]} of {num_images}. Add the image to the row.")
    if numbers:
        return _NUMBERED_MARK.sub(IMAGE_MARK, text.replace(IMAGE_MARK, "")), tuple(numbers)
    if text.count(IMAGE_MARK) != num_images or not num_images:
        text = IMAGE_MARK * num_images + text.replace(IMAGE_MARK, "")
    return text, tuple(range(num_images))


def _multiple_choice(metric: str, question: str, choices: Mapping[str, str], hint: str | None, compat: Compat) -> str:
    listed = [f"{letter}. {text}" for letter, text in choices.items()]
    if compat == "lmms-eval":
        if metric == "mmbench":
            start = f"{hint} {question}" if hint else question
            return _lines([f"{start} There are several options:", *listed]) + LETTER_LMMS
        return _lines([question, *listed]) + LETTER_LMMS
    lines = [f"Hint: {hint}"] if hint else []
    lines.append(f"Question: {question}")
    if listed:
        lines += ["Options:", *listed, SELECT.rstrip("\n")]
    return _lines(lines) + "\n"


def _mmmu(question: str, choices: Mapping[str, str], compat: Compat, *, cot: bool) -> str:
    if not question:  # the question is in the image
        return IN_IMAGE + (REASON if cot else LETTER)
    listed = [f"{letter}. {text}" for letter, text in choices.items()]
    if compat == "lmms-eval":
        return _lines([question, *listed, LETTER_LMMS])
    asked = f"Answer the following multiple-choice question. {REASON}" if cot else LETTER
    return _lines([f"Question: {question}", *(["Options:", *listed, asked] if listed else [""])])


def _lines(lines: Sequence[str]) -> str:
    return "\n".join(lines)


def as_hint(value: Any) -> str | None:
    """A hint, None if the cell is empty or NaN."""
    text = "" if value is None or value != value else str(value).strip()
    return None if text in ("", "nan") else text
