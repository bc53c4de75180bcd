# SPDX-License-Identifier: Apache-2.0
"""Multiple choice: find the option letter in an answer, and compare it with the reference.

Used for MMBench, AI2D, MMMU-Pro, GPQA, C-Eval and other benchmarks with options. An answer without an option is wrong;
where a project draws an option at random, nothing is drawn.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mindvl_merge.evaluation.metrics.options import Compat, letters, read_choices

UNANSWERED = "Z"  # letter that VLMEvalKit gives to answers that choose no option

_SEPARATORS = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))
_API_FAILURE = "Failed to obtain answer via API"
# Sentences of some models; an answer with one of them chooses no option.
_REFUSALS = (
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)
_VERBOSE = re.compile(r"(?:correct\s+)?answer\s+is\s+\**([ABCD])\**", re.IGNORECASE)
_LAST_WORDS = 5  # an option letter counts if it is among so many last words

# lmms-eval's general extraction: phrases before an answer, and what outranks what.
_PHRASES = (
    "the answer is", "answer is", "the correct answer is", "correct answer is", "the best answer is", "best answer is",
    "the correct option is", "correct option is", "the best option is", "best option is", "the choice is", "choice is",
    "the correct choice is", "correct choice is", "i choose", "i select", "i pick", "my answer is", "my choice is",
    "\uc635\uc158", "\uc815\ub2f5\uc740", "\ub2f5\uc740", "\ub2f5:",
    "\u7b54\u6848\u662f", "\u7b54\u6848\u4e3a", "\u9009", "\u7b54\u3048\u306f",
)  # fmt: skip
_ENDS = ((".", 5), (":", 4), (")", 3), (" ", 2))


def multiple_choice(
    prediction: str, references: Sequence[str], compat: Compat, *, choices: Any = None, **_: Any
) -> float:
    """1.0 if the option found in the prediction is the reference (a letter, or the text of an option).

    Args:
        choices: Options (options.read_choices); without them letters A to D are looked for, and no texts.
    """
    options = read_choices(choices)
    if compat == "lmms-eval":
        found: str | None = extract_letter(prediction, sorted(options) or list("ABCDEFGH"))
    else:
        found = infer_option(prediction, options or dict.fromkeys("ABCD", ""), has_texts=bool(options), compat=compat)
    return float(found in {as_letter(reference, options) for reference in references} and bool(found))


def mmbench(prediction: str, references: Sequence[str], compat: Compat, *, choices: Any = None, **_: Any) -> float:
    """One question of MMBench; `aggregate` joins the rotations of a question."""
    if compat != "lmms-eval":
        return multiple_choice(prediction, references, compat, choices=choices)
    options = {key: text for key, text in read_choices(choices).items() if key in "ABCD"}
    found = _lmms_option(prediction) or _only_text(prediction, options)
    found = found or extract_letter(prediction, sorted(options) or list("ABCDEFGH"))
    return float(found in {as_letter(reference, options) for reference in references} and bool(found))


def ai2d(prediction: str, references: Sequence[str], compat: Compat, *, choices: Any = None, **_: Any) -> float:
    """As `multiple_choice`; lmms-eval takes a leading `A.` or the whole answer, without case and punctuation."""
    if compat != "lmms-eval":
        return multiple_choice(prediction, references, compat, choices=choices)
    leading = re.match(r"\s*([A-Z])\.", prediction)
    dropped = str.maketrans("", "", string.punctuation)
    text = leading.group(1) if leading else prediction
    given = text.lower()[: len(text)].translate(dropped)  # numpy keeps the width of an array of texts
    return float(any(given == reference.lower().translate(dropped) for reference in references))


def mmmu(
    prediction: str,
    references: Sequence[str],
    compat: Compat,
    *,
    choices: Any = None,
    cot: bool = False,
    **_: Any,
) -> float:
    """One question of MMMU or MMMU-Pro.

    Args:
        choices: Options; an open question has none and is right if the answer contains the reference (VLMEvalKit makes
            it a choice between the reference and `Other Answers`).
        cot: The prediction ends with a line `Answer: $LETTER`, as VLMEvalKit's prompt for reasoning asks.
    """
    options = read_choices(choices)
    if cot and compat != "lmms-eval":
        prediction = last_answer_line(prediction)
    if compat == "lmms-eval":
        found = mmmu_letter(prediction, options) if options else prediction
        return float(found in references)
    is_open = not options and not any(len(reference) == 1 and reference.isupper() for reference in references)
    if is_open:
        options, references = {"A": references[0], "B": "Other Answers"}, ["A"]
    return multiple_choice(prediction, references, compat, choices=options or None)


def as_letter(reference: str, options: Mapping[str, str]) -> str:
    """The letter of a reference; a text that is not a letter is looked up among the options."""
    text = reference.strip()
    inner = text[1:-1] if len(text) == 3 and text[0] == "(" and text[2] == ")" else text
    if len(inner) == 1 and inner in string.ascii_uppercase:
        return inner
    return next((letter for letter, option in options.items() if option == reference), text)


def infer_option(prediction: str, options: Mapping[str, str], *, has_texts: bool, compat: Compat) -> str | None:
    """The option that VLMEvalKit infers from an answer without a judge, `Z` for a refusal, None if it finds none."""
    found = _inferred_letter(prediction, list(options), compat)
    if found is None and has_texts:
        if compat == "strict":
            options = {key: text for key, text in options.items() if text.strip()}
        if len(prediction.lower()) <= 2 * sum(len(text) for text in options.values()):
            found = _only_text(prediction, options)
    return found


def _inferred_letter(prediction: str, options: Sequence[str], compat: Compat) -> str | None:
    if _API_FAILURE in prediction:
        return None
    if any(refusal in prediction for refusal in _REFUSALS):
        return UNANSWERED
    words = prediction.translate(_SEPARATORS).split()
    present = [letter for letter in options if letter in words]
    if len(present) == 1:
        place = words.index(present[0])
        if compat == "strict":  # the last occurrence: "A cat, so A" starts with an article
            place = len(words) - 1 - words[::-1].index(present[0])
        if place > len(words) - _LAST_WORDS:
            return present[0]
    elif not present and UNANSWERED in words:
        return UNANSWERED
    verbose = _VERBOSE.search(prediction)
    return verbose.group(1).upper() if verbose and verbose.group(1).upper() in options else None


def _only_text(prediction: str, options: Mapping[str, str]) -> str | None:
    text = prediction.lower()
    present = [letter for letter, option in options.items() if option.lower() in text]
    return present[0] if len(present) == 1 else None


def _lmms_option(prediction: str) -> str | None:
    """lmms-eval's rule for MMBench: one letter from A to E as a word, alone or with one kind of mark."""
    if _API_FAILURE in prediction:
        return None
    words = set(prediction.split())
    present = [letter for letter in letters(5) if letter in words]
    if len(present) == 1 and not ("A" in words and len(prediction.split()) > 3):  # an article is no answer
        return present[0]
    for before, after in [("", mark) for mark in (".", ",", ":", ")", ").")] + [
        ("(", ")"), ("(", ")."), *((":", mark) for mark in ("", ",", ".", ")", ").")),
    ]:  # fmt: skip
        marked = [letter for letter in letters(5) if f"{before}{letter}{after}" in words]
        if len(marked) == 1:
            return marked[0]
    return None


def extract_letter(prediction: str, options: Sequence[str]) -> str | None:
    """lmms-eval's general extraction: of all letters, the one in the most telling place, the later one of two."""
    stripped = prediction.strip()
    if not stripped:
        return None
    for mark in ",.!?;:'\"":
        stripped = stripped.strip(mark)
    text = f" {stripped} "
    found: list[tuple[int, int, str]] = []  # rank, place, letter
    found += [(6, text.rfind(f"({letter})"), letter) for letter in options if f"({letter})" in text]
    for mark, rank in _ENDS:
        found += [(rank, text.rfind(letter + mark), letter) for letter in options if letter + mark in text]
    lower = text.lower()
    for phrase in _PHRASES:
        start = lower.find(phrase)
        if start >= 0:
            places = ((text.find(letter, start + len(phrase)), letter) for letter in options)
            found += [(7, place, letter) for place, letter in places if place >= 0]
    body = text.strip()
    for letter in options:
        if body.startswith(letter) and not body[1:2].isalpha():
            found.append((10, 0, letter))
        if body.endswith(letter) and not body[-2:-1].isalpha():
            found.append((9, len(text) - 1, letter))
    found = found or [(0, text.rfind(letter), letter) for letter in options if letter in text]
    # the first of equal candidates, as a stable sort by falling rank and place gives
    return max(found, key=lambda candidate: candidate[:2])[2] if found else None


def mmmu_letter(prediction: str, options: Mapping[str, str]) -> str | None:
    """lmms-eval's rule for MMMU: `(A)`, then `A `, then `A.`, then texts of options; the last one of several."""
    for mark in ",.!?;:'":
        prediction = prediction.strip(mark)
    text = f" {prediction} "
    lower = text.lower()
    for written, place in (("({})", "({})"), ("{} ", " {} "), ("{}.", " {} ")):
        present = [letter for letter in options if written.format(letter) in text]
        if present:
            return max(present, key=lambda letter: text.rfind(place.format(letter)))
    if len(text.split()) > 5:
        present = [letter for letter, option in options.items() if option.lower() in lower]
        if present:
            return max(present, key=lambda letter: lower.rfind(options[letter].lower()))
    return None


def last_answer_line(prediction: str) -> str:
    """The text after `Answer:` in the last line that starts so, reduced to its capital letter if it has one kind."""
    lines = [line.strip() for line in prediction.strip().split("\n")]
    tails = [line.removeprefix("Answer:") for line in lines if line.startswith("Answer:")]
    if not tails:
        return prediction
    capitals = Counter(character for character in tails[-1] if character in string.ascii_uppercase)
    return next(iter(capitals)) if len(capitals) == 1 else tails[-1]
