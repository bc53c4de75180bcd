# SPDX-License-Identifier: Apache-2.0
"""MathVista and MathVision without a judge: typed answers, LaTeX, and numerical equality.

An answer that a judge has extracted is scored the same way: pass it as the prediction. No answer is evaluated by Python
(arithmetic.py).
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from mindvl_merge.evaluation.metrics.arithmetic import MATH_NAMES, MAX_LENGTH, PYTHON_NAMES, NoValueError, value_of
from mindvl_merge.evaluation.metrics.choices import as_letter, infer_option
from mindvl_merge.evaluation.metrics.options import Compat, as_words, read_choices

_TOLERANCE = 1e-6
_COSTLY = re.compile(r"binom|choose|gcd|lcm")  # sympy computes these at once, in hours for large numbers
_LARGE_NUMBER = re.compile(r"\d{5}")


def mathvista(
    prediction: str,
    references: Sequence[str],
    compat: Compat,
    *,
    question_type: str = "free_form",
    answer_type: str = "text",
    choices: Any = None,
    precision: Any = 0,
    answer_option: str | None = None,
    **_: Any,
) -> float:
    """1.0 if the answer, read as the item's type, equals the reference.

    Args:
        question_type: `multi_choice` or `free_form`.
        answer_type: `integer`, `float`, `list` or `text`.
        choices: Options of a multiple-choice question.
        precision: Decimals to which lmms-eval rounds a float.
        answer_option: Letter of the right option; default: that of the option equal to the reference.
    """
    options = read_choices(choices)
    if compat == "lmms-eval":
        given = _lmms_typed(prediction.strip(), list(options.values()), question_type, answer_type, precision)
        return float(any(str(given).strip() == reference.strip() for reference in references))
    if question_type == "multi_choice":
        texts = {text: letter for letter, text in reversed(options.items())}
        letters = {texts.get(reference) or as_letter(reference, options) for reference in references}
        expected = {answer_option} if answer_option else letters
        return float(infer_option(prediction, options, has_texts=True, compat=compat) in expected)
    return float(any(_is_typed_equal(prediction, reference, answer_type, compat) for reference in references))


def _is_typed_equal(prediction: str, reference: str, answer_type: str, compat: Compat) -> bool:
    if answer_type not in ("integer", "float"):
        # VLMEvalKit compares the text `None` here, so that no text and no list is ever right
        return as_words(prediction) == as_words(reference) if compat == "strict" else reference == "None"
    number: type[int] | type[float] = int if answer_type == "integer" else float
    try:
        given, expected = number(prediction), number(reference)
    except ValueError:
        return False
    if compat == "strict":
        return math.isclose(given, expected, rel_tol=1e-9, abs_tol=1e-9)
    return given == expected


def _lmms_typed(
    prediction: str, options: list[str], question_type: str, answer_type: str, precision: Any
) -> str | None:
    if question_type == "multi_choice":
        return _lmms_option(prediction, options)
    try:
        if answer_type == "integer":
            return str(int(float(prediction)))
        if answer_type == "float":
            return str(round(float(prediction), precision))
    except (ValueError, OverflowError, TypeError):  # TypeError: a precision of 1.0, which round() does not accept
        return None
    return prediction


def _lmms_option(prediction: str, options: list[str]) -> str | None:
    """The text of `(A)`, of a lone letter, or of the option with the smallest edit distance."""
    from rapidfuzz.distance import Levenshtein

    if not options or not prediction:
        return min(options, key=len) if options else None  # the smallest distance to an empty answer
    letter = re.search(r"\(([a-zA-Z])\)", prediction)
    text = letter.group(1).upper() if letter else prediction
    index = ord(text) - ord("A") if len(text) == 1 else -1
    if 0 <= index < len(options):
        return options[index]
    return min(options, key=lambda option: Levenshtein.distance(text, option))


def mathvision(prediction: str, references: Sequence[str], compat: Compat, *, choices: Any = None, **_: Any) -> float:
    """1.0 if the answer is the right option, the same text, or has the same numerical value.

    Args:
        choices: Options; without them the question is free-form.
    """
    options = read_choices(choices)
    if compat == "lmms-eval":
        return float(any(_lmms_mathvision(prediction, reference, options) for reference in references))
    given: str | None = prediction
    if options:
        given = infer_option(prediction, options, has_texts=True, compat=compat)
        references = [as_letter(reference, options) for reference in references] if compat == "strict" else references
    return float(given is not None and any(is_same_value(given, reference, compat) for reference in references))


def is_same_value(prediction: str, reference: str, compat: Compat) -> bool:
    """Whether two answers are equal as text, as arithmetic, or as LaTeX; case does not matter.

    VLMEvalKit evaluates the prediction where the value of the reference is bound to the name `a`, so that the answer
    `a` equals every number; `vlmevalkit` reproduces this, `strict` does not.
    """
    given, expected = prediction.lower().strip(), reference.lower().strip()
    if given == expected:
        return True
    try:
        first = value_of(expected, PYTHON_NAMES)
        second = value_of(given, PYTHON_NAMES if compat == "strict" else {**PYTHON_NAMES, "a": first})
        if abs(first - second) < _TOLERANCE:
            return True
    except (ValueError, ArithmeticError, TypeError):
        pass
    try:
        left, right = latex(expected), latex(given)
        names = MATH_NAMES if compat == "strict" else {**PYTHON_NAMES, "a": left, "b": right}
        return bool(abs(value_of(str(left), names) - value_of(str(right), names)) < _TOLERANCE)
    except Exception:  # the parser of LaTeX and sympy raise many kinds of errors for text that is not mathematics
        return False


def latex(text: str) -> Any:
    """A sympy expression of LaTeX.

    Raises:
        Exception: It is not LaTeX, or too long or costly to evaluate.
    """
    from latex2sympy2_extended import latex2sympy

    if len(text) > MAX_LENGTH or (_COSTLY.search(text) and _LARGE_NUMBER.search(text)):
        raise NoValueError
    return latex2sympy(text)


def _lmms_mathvision(prediction: str, reference: str, options: dict[str, str]) -> bool:
    answer = prediction.strip()
    index = ord(reference) - ord("A") if options and len(reference) == 1 else -1
    text_of_reference = list(options.values())[index] if 0 <= index < len(options) else ""
    for letter in "ABCDE":
        starts = (f"{letter}\n", f"({letter})\n", f"({letter}) {letter}\n")
        if answer.endswith((f" {letter}.", f" ({letter}).")) or answer.startswith(starts):
            answer = letter
    tail = answer.split("is ")[-1].rstrip(".")
    if _is_float(tail):
        answer = tail
    if "oxed{" not in answer:
        for phrase in ("the final answer is", "the answer is", "the correct answer is", "the answer should be"):
            for written in (phrase, phrase.replace("the", "The")):
                before, answer = answer, answer.split(written)[-1].strip()
                if written in before:
                    answer = answer.split("\n")[0].split(". ")[0]
    elif answer.count("oxed{") > 1:
        answer = "\\boxed{" + answer.split("oxed{")[-1]
    answer = _lmms_cleaned(answer)
    for letter in "abcde":
        answer = answer.replace(f"({letter})", letter)
    for letter in "abcde":
        answer = answer.replace(f"{{{letter}}}", letter)
    answer = answer.rstrip(".").lstrip(":").strip()
    return any(_lmms_equal(expected, answer) for expected in (reference, text_of_reference))


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# What lmms-eval removes or replaces in an answer, in its order.
_CLEANING = (
    (" ", ""), ("\\,", ""), ("\u221e", "\\infty"), ("+\\infty", "\\infty"), ("\\\\", "\\"), ("\n", ""), ("\\text", ""),
    ("\\mbox", ""), ("bmatrix", "pmatrix"), ("\\left", ""), ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""),
    ("{m}^3", ""), ("m^3", ""), ("{units}", ""), ("units", ""), ("{km}", ""), ("km", ""),
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""),
    ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""), ("$", ""),
)  # fmt: skip


def _lmms_cleaned(text: str) -> str:
    """The content of the last box (or the whole text), after `=`, in plain LaTeX."""
    text = text.lower().replace("{}", "")
    boxes = re.findall(r"oxed{(.*)}", text, flags=re.DOTALL)
    text = boxes[-1] if boxes else text
    closing, opening = text.find("}"), text.find("{")
    if closing != -1 and (opening == -1 or closing < opening):
        text = text.split("}")[0]
    text = text.split("=")[-1].split("\\approx")[-1]
    for old, new in _CLEANING:
        text = text.replace(old, new)
    text = text.split("\\text{ ")[0].replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = "0" + text if text.startswith(".") else text
    for sign in ("=", "\\approx"):
        text = text.split(sign)[-1] if text.count(sign) == 1 else text
    if "sqrt" in text:
        text = _braced_roots(text)
    text = text.replace(" ", "")
    if "sqrt" in text:
        text = _braced_fractions(text)
    return _slash_as_fraction("\\frac{1}{2}" if text == "0.5" else text)


def _braced_roots(text: str) -> str:
    first, *rest = text.split("\\sqrt")
    braced = [f"\\sqrt{{{part[0]}}}{part[1:]}" if part and part[0] != "{" else f"\\sqrt{part}" for part in rest]
    return first + "".join(braced)


def _braced_fractions(text: str) -> str:
    first, *rest = text.split("\\frac")
    result = first
    for part in rest:
        if part.startswith("{"):
            result += "\\frac" + part
        elif len(part) < 2:
            return text
        else:
            below = part[1:] if part[1] == "{" else f"{{{part[1]}}}{part[2:]}"
            result += f"\\frac{{{part[0]}}}{below}"
    return result


def _slash_as_fraction(text: str) -> str:
    parts = text.split("/")
    if len(parts) != 2:
        return text
    try:
        above, below = int(parts[0]), int(parts[1])
    except ValueError:
        return text
    return f"\\frac{{{above}}}{{{below}}}" if text == f"{above}/{below}" else text


def _lmms_equal(first: str, second: str) -> bool:
    first, second = first.lower(), second.lower()
    if not first.replace(" ", "") or not second.replace(" ", ""):
        return False
    if first.strip() == second.strip():
        return True
    first, second = _rounded_entries(first), _rounded_entries(second)
    if first == second:
        return True
    try:
        return bool(round(_latex_value(second), 2) == round(_latex_value(first), 2))
    except Exception:  # see is_same_value
        return False


def _rounded_entries(text: str) -> str:
    entries = text[1:-1].split(",")
    if len(entries) < 2 or (text[0], text[-1]) not in (("(", ")"), ("[", "]")):
        return text
    try:
        values = [
            entry if "infty" in entry or entry in ("a", "-a") else str(round(_latex_value(entry), 2))
            for entry in entries
        ]
    except Exception:  # see is_same_value
        return text
    return f"{text[0]}{','.join(values)}{text[-1]}"


def _latex_value(text: str) -> Any:
    return value_of(str(latex(text)), MATH_NAMES)
