# SPDX-License-Identifier: Apache-2.0
"""Metrics that compare short texts: edit similarity, relaxed numbers, equality, and OCRBench's substrings.

Registered in registry.py; what each project does differently is in docs/reference/evaluation-metrics.md.
"""

import math
import re
import string
from collections.abc import Sequence
from typing import Any

from mindvl_merge.evaluation.metrics.options import Compat, as_words

FORMULA_CATEGORY = "Handwritten Mathematical Expression Recognition"
FORMULA_DATASET = "HME100k"

_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?%?")
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: ord(" ")}


def anls(prediction: str, references: Sequence[str], compat: Compat, *, threshold: float = 0.5, **_: Any) -> float:
    """Normalized Levenshtein similarity with the best reference; 0 below `threshold` (Biten et al., 2019).

    Both projects divide by the length before white space is removed, which padding can inflate; `strict` does not.
    """
    similarity = 1 - min(_normalized_distance(reference, prediction, compat) for reference in references)
    return 0.0 if similarity < threshold else float(similarity)


def _normalized_distance(reference: str, prediction: str, compat: Compat) -> float:
    from rapidfuzz.distance import Levenshtein

    expected, given = as_words(reference.lower()), as_words(prediction.lower())
    sides = (expected, given) if compat == "strict" else (reference.upper(), prediction.upper())
    length = max(len(side) for side in sides)
    return Levenshtein.distance(expected, given) / length if length else 0.0


def relaxed_accuracy(
    prediction: str, references: Sequence[str], compat: Compat, *, max_relative_change: float = 0.05, **_: Any
) -> float:
    """1.0 if a number is within `max_relative_change` of a reference, or a text equals it in any case (ChartQA)."""
    if compat != "lmms-eval":
        prediction = prediction.strip()
    return float(any(_is_close(prediction, reference, compat, max_relative_change) for reference in references))


def _is_close(prediction: str, reference: str, compat: Compat, tolerance: float) -> bool:
    if compat == "strict":
        given, expected = _strict_number(prediction), _strict_number(reference)
        if given is None or expected is None:
            return as_words(prediction.casefold()) == as_words(reference.casefold())
        return abs(given - expected) <= tolerance * abs(expected)
    given, expected = _number(prediction), _number(reference)
    if given is not None and expected:  # a reference of 0 is compared as text
        return abs(given - expected) / abs(expected) <= tolerance
    return prediction.lower() == reference.lower()


def _number(text: str) -> float | None:
    """What float() reads, which includes `nan`, `inf` and `1_000`; a percent sign divides by 100."""
    try:
        return float(text.rstrip("%")) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        return None


def _strict_number(text: str) -> float | None:
    text = text.strip()
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    value = None if "_" in text else _number(text)
    return value if value is not None and math.isfinite(value) else None


def exact_match(
    prediction: str,
    references: Sequence[str],
    compat: Compat,
    *,
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    ignore_numbers: bool = False,
    regexes_to_ignore: Sequence[str] = (),
    **_: Any,
) -> float:
    """1.0 if the prediction equals a reference.

    VLMEvalKit ignores case and outer white space, lmms-eval what the options say, `strict` only the amount of white
    space.
    """
    if compat == "vlmevalkit":
        return float(any(prediction.strip().lower() == reference.strip().lower() for reference in references))
    if compat == "strict":
        return float(any(as_words(prediction) == as_words(reference) for reference in references))

    def prepared(text: str) -> str:
        for pattern in regexes_to_ignore or ():
            text = re.sub(pattern, "", text)
        text = text.lower()[: len(text)] if ignore_case else text  # numpy keeps the width of an array of texts
        dropped = string.punctuation * ignore_punctuation + string.digits * ignore_numbers
        return text.translate(str.maketrans("", "", dropped))

    return float(any(prepared(prediction) == prepared(reference) for reference in references))


def gqa(prediction: str, references: Sequence[str], compat: Compat, **_: Any) -> float:
    """Equality; lmms-eval also ignores case and ASCII punctuation."""
    return exact_match(prediction, references, compat, ignore_case=True, ignore_punctuation=True)


def ocrbench(
    prediction: str,
    references: Sequence[str],
    compat: Compat,
    *,
    category: str | None = None,
    dataset: str | None = None,
    question_type: str | None = None,
    **_: Any,
) -> float:
    """1.0 if the prediction contains a reference; formulas are compared with their case and without blanks.

    Args:
        category, question_type: Category of the item, in either project's column.
        dataset: Source of the item, which is what lmms-eval looks at (`HME100k` has the formulas).
    """
    kind = category if category is not None else question_type
    if compat == "lmms-eval":
        is_formula = dataset == FORMULA_DATASET if dataset is not None else kind == FORMULA_CATEGORY
    else:
        is_formula = kind == FORMULA_CATEGORY if kind is not None else dataset == FORMULA_DATASET

    def prepared(text: str) -> str:
        if is_formula:
            return text.strip().replace("\n", " ").replace(" ", "")
        if compat == "lmms-eval":
            text = text.translate(_FULL_WIDTH)
        return text.lower().strip().replace("\n", " ")

    given = prepared(prediction.strip() if compat == "lmms-eval" else prediction)
    expected = [prepared(reference) for reference in references]
    if compat == "strict":
        expected = [reference for reference in expected if reference]  # an empty text is in every answer
    return float(any(reference in given for reference in expected))
