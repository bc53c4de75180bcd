# SPDX-License-Identifier: Apache-2.0
"""The accuracy of VQAv2 over several human answers, with the normalization of its official evaluation.

Used for VQAv2, TextVQA, VizWiz and OK-VQA. Source: Antol et al., 2015, and the evaluation code published with it.
"""

import re
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from mindvl_merge.evaluation.metrics.options import Compat

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_ARTICLES = frozenset({"a", "an", "the"})
_DIGIT_WORDS = "zero one two three four five six seven eight nine ten"
_NUMBERS = {word: str(value) for value, word in enumerate(_DIGIT_WORDS.split())} | {"none": "0"}

# Contractions restored when they are written without any apostrophe.
_REGULAR = """
ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't he'd he's how'd how'll how's isn't it'd
it'll ma'am mightn't might've mustn't must've needn't not've o'clock oughtn't shan't should've shouldn't somebody'll
somebody's someone'd someone'll someone's something'd something'll that's there'd there're there's they'd they'll
they're they've 'twas wasn't we've weren't what'll what're what's what've when's where'd where's where've who'd who'll
who's who've why'll why're why's won't would've wouldn't y'all you'd you'll you're you've
"""
# Contractions restored when one apostrophe, before or after the last part, is missing.
_DOUBLE = """
couldn't've hadn't've he'd've it'd've mightn't've she'd've shouldn't've somebody'd've someone'd've something'd've
there'd've they'd've we'd've who'd've wouldn't've y'all'd've you'd've
"""
_CONTRACTIONS = {word.replace("'", ""): word for word in _REGULAR.split()}
_CONTRACTIONS |= {word[::-1].replace("'", "", 1)[::-1]: word for word in _DOUBLE.split()}
_CONTRACTIONS |= {word.replace("'", "", 1): word for word in _DOUBLE.split()}
_CONTRACTIONS |= {
    "ow's'at": "'ow's'at", "'ows'at": "'ow's'at", "'ow'sat": "'ow's'at", "somebody'd": "somebodyd",
    "yall'll": "y'all'll", "y'allll": "y'all'll", "y'alld've": "y'all'd've",
}  # fmt: skip

_DIGIT_COMMA_DIGIT = re.compile(r"\d,\d")
_DIGIT_COMMAS_DIGIT = re.compile(r"(?<=\d),+(?=\d)")
_LONE_PERIOD = re.compile(r"(?<!\d)\.(?!\d)")
_PERIOD_BEFORE_NO_DIGIT = re.compile(r"\.(?!\d)")
# Both projects pass a flag in the place of the number of replacements; re.UNICODE is 32.
_MAX_PERIODS = 32


def vqa_accuracy(prediction: str, references: Sequence[str], compat: Compat, **_: Any) -> float:
    """Mean over the references of min(1, equal other references / 3); `strict` accepts fewer than four references."""
    return _leave_one_out(_normal(prediction, compat), [_normal(reference, compat) for reference in references], compat)


def textvqa(prediction: str, references: Sequence[str], compat: Compat, **_: Any) -> float:
    """VQA accuracy; lmms-eval first removes commas and question marks and separates a final 's."""

    def normal(text: str) -> str:
        if compat == "lmms-eval":
            text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
        return _normal(text, compat)

    return _leave_one_out(normal(prediction), [normal(reference) for reference in references], compat)


def _leave_one_out(prediction: str, references: Sequence[str], compat: Compat) -> float:
    if compat == "strict" and len(references) < 4:
        return float(prediction in references)
    equal = [reference == prediction for reference in references]
    return fmean(min(1.0, (sum(equal) - own) / 3) for own in equal)


def _normal(text: str, compat: Compat) -> str:
    text = strip_punctuation(text.replace("\n", " ").replace("\t", " ").strip(), compat)
    words = [_NUMBERS.get(word, word) for word in text.lower().split()]
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


def strip_punctuation(text: str, compat: Compat) -> str:
    """Remove a mark that touches a blank anywhere (or every mark, if a comma separates digits); others become blanks."""
    commas = _DIGIT_COMMAS_DIGIT if compat == "lmms-eval" else _DIGIT_COMMA_DIGIT
    has_number = commas.search(text) is not None
    result = text
    for mark in _PUNCTUATION:
        is_removed = has_number or f"{mark} " in text or f" {mark}" in text
        result = result.replace(mark, "" if is_removed else " ")
    period = _PERIOD_BEFORE_NO_DIGIT if compat == "lmms-eval" else _LONE_PERIOD
    return period.sub("", result, count=0 if compat == "strict" else _MAX_PERIODS)
