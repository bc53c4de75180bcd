# SPDX-License-Identifier: Apache-2.0
"""Yes/no questions: MME, HallusionBench, POPE."""

from collections.abc import Sequence
from typing import Any

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.metrics.options import Compat
from mindvl_merge.evaluation.metrics.vqa import strip_punctuation

_HALLUSION_LABELS = {"1": "yes", "0": "no", "1.0": "yes", "0.0": "no"}


def yes_no(prediction: str, references: Sequence[str], compat: Compat, **_: Any) -> float:
    """1.0 if the prediction has the word of the reference and not the opposite one.

    lmms-eval (MME) looks at the first four characters instead.
    """
    given = _first_characters(prediction) if compat == "lmms-eval" else _word(prediction, compat)
    return float(any(given == label(reference) for reference in references))


def hallusionbench(prediction: str, references: Sequence[str], compat: Compat, **_: Any) -> float:
    """As `yes_no`; without a judge, lmms-eval reads every answer without the letters `yes` as no."""
    if compat != "lmms-eval":
        return yes_no(prediction, references, compat)
    given = "yes" if "yes" in prediction.lower() else "no"
    return float(any(given == label(reference) for reference in references))


def pope(prediction: str, references: Sequence[str], compat: Compat, **_: Any) -> float:
    """As `yes_no`; lmms-eval requires the whole answer to be the word."""
    if compat != "lmms-eval":
        return yes_no(prediction, references, compat)
    return float(any(prediction.lower().strip() == label(reference) for reference in references))


def label(reference: str) -> str:
    """`yes` or `no` of a reference; HallusionBench writes 1 and 0 too.

    Raises:
        EvaluationError: It is neither.
    """
    text = reference.lower().strip().replace(".", "") if reference not in _HALLUSION_LABELS else reference
    text = _HALLUSION_LABELS.get(text, text)
    if text not in ("yes", "no"):
        raise EvaluationError(f"references: {reference!r} is neither yes nor no. Correct the item.")
    return text


def _word(prediction: str, compat: Compat) -> str | None:
    words = strip_punctuation(prediction.lower(), compat).split()
    if ("yes" in words) == ("no" in words):
        return None
    return "yes" if "yes" in words else "no"


def _first_characters(prediction: str) -> str | None:
    text = prediction.lower().strip().replace(".", "")
    if len(text) == 1:
        return {"y": "yes", "n": "no"}.get(text)
    return next((word for word in ("yes", "no") if word in text[:4]), None)
