# SPDX-License-Identifier: Apache-2.0
"""Metrics that a judge model decides: MM-Vet, Chinese SimpleQA and Arena-Hard.

The prompts are ours; record them with the score, because another wording or judge gives another number. A judgement that
cannot be read is a failed item with the score 0, never a guess.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.metrics.options import Compat

Judge = Callable[[str], str]  # prompt -> reply of the judge

NUM_TRIES = 5

MMVET_PROMPT = """\
Grade an answer to a question about an image. Parts of the reference that are joined by <AND> must all be in the answer;
of parts joined by <OR>, one is enough. Ignore wording, and accept a correct explanation around the answer.
Reply with one number and nothing else: 0.0 (wrong), 0.1, 0.2, and so on to 1.0 (right); give the share of the required
parts that the answer contains.

Question: {question}
Reference: {reference}
Answer: {prediction}
Grade:"""

SIMPLEQA_PROMPT = """\
Decide whether an answer to a short factual question is correct. Compare its meaning with the reference; wording, language
and additional correct facts do not matter. An answer that contradicts the reference, or names several candidates, is
incorrect. An answer that says it does not know, or gives no fact, is not attempted.
Reply with one letter and nothing else: A for correct, B for incorrect, C for not attempted.

Question: {question}
Reference: {reference}
Answer: {prediction}
Letter:"""

ARENA_PROMPT = """\
Compare two assistants' replies to a user's request. First work out a reply yourself, then judge which reply is more
correct, helpful, relevant and concise, regardless of their order and length. End with one verdict in double brackets:
[[A>>B]] A is much better, [[A>B]] A is better, [[A=B]] equal, [[B>A]] B is better, [[B>>A]] B is much better.

Request: {question}

Reply of assistant A: {first}

Reply of assistant B: {second}"""

_VERDICT = re.compile(r"\[\[(A>>B|A>B|A=B|B>A|B>>A)\]\]")
_WINS = {"A>>B": 1.0, "A>B": 1.0, "A=B": 0.5, "B>A": 0.0, "B>>A": 0.0}


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The result of a judge for one item."""

    score: float  # from 0 to 1; 0 for a failed judgement
    is_failed: bool
    prompt: str
    reply: str  # last reply; empty if the judge did not answer


def ask(judge: Judge, prompt: str, read: Callable[[str], float | None], *, num_tries: int = NUM_TRIES) -> Judgement:
    """Ask until a reply can be read, at most `num_tries` times.

    Args:
        read: Score of a reply, None if it cannot be read.
    """
    reply = ""
    for _ in range(num_tries):
        reply = judge(prompt)
        score = read(reply)
        if score is not None:
            return Judgement(score=score, is_failed=False, prompt=prompt, reply=reply)
    return Judgement(score=0.0, is_failed=True, prompt=prompt, reply=reply)


def mmvet(
    prediction: str,
    references: Sequence[str],
    compat: Compat,
    *,
    question: str = "",
    judge: Judge | None = None,
    judgement: str | None = None,
    **_: Any,
) -> float:
    """Grade from 0 to 1 by a judge; lmms-eval reads the first word of a reply, the others the whole reply.

    Args:
        judge: Answers the prompt.
        judgement: A reply that is already there.
    """
    reference = references[0].replace("<AND>", " <AND> ").replace("<OR>", " <OR> ")
    prompt = MMVET_PROMPT.format(question=question, reference=reference, prediction=prediction)
    return _judged("mmvet", prompt, lambda reply: read_grade(reply, compat), judge, judgement)


def read_grade(reply: str, compat: Compat) -> float | None:
    """A number from 0 to 1, or None."""
    text = reply.strip().split(" ")[0] if compat == "lmms-eval" else reply
    try:
        grade = float(text)
    except ValueError:
        return None
    return grade if math.isfinite(grade) and 0 <= grade <= 1 else None


def simpleqa(
    prediction: str,
    references: Sequence[str],
    compat: Compat,
    *,
    question: str = "",
    judge: Judge | None = None,
    judgement: str | None = None,
    **_: Any,
) -> float:
    """1.0 if the judge's first letter of A, B and C is A."""
    prompt = SIMPLEQA_PROMPT.format(question=question, reference=" / ".join(references), prediction=prediction)
    return _judged("simpleqa", prompt, _read_letter, judge, judgement)


def _read_letter(reply: str) -> float | None:
    letter = re.search("[ABC]", reply)
    return float(letter.group() == "A") if letter else None


def arena_hard(
    prediction: str,
    references: Sequence[str],
    compat: Compat,
    *,
    question: str = "",
    judge: Judge | None = None,
    judgement: str | None = None,
    **_: Any,
) -> float:
    """Share of wins against the baseline's reply (the reference), a tie is one half; the judge sees both orders."""
    if judgement is not None:
        return _judged("arena_hard", "", read_verdict, None, judgement)
    first = ARENA_PROMPT.format(question=question, first=prediction, second=references[0])
    second = ARENA_PROMPT.format(question=question, first=references[0], second=prediction)
    won = _judged("arena_hard", first, read_verdict, judge, None)
    return (won + _judged("arena_hard", second, _swapped_verdict, judge, None)) / 2


def read_verdict(reply: str) -> float | None:
    """1.0 if assistant A wins, 0.5 for a tie, None if the reply has no verdict or two different ones."""
    verdicts = set(_VERDICT.findall(reply))
    return _WINS[verdicts.pop()] if len(verdicts) == 1 else None


def _swapped_verdict(reply: str) -> float | None:
    won = read_verdict(reply)
    return None if won is None else 1.0 - won


def _judged(
    metric: str, prompt: str, read: Callable[[str], float | None], judge: Judge | None, judgement: str | None
) -> float:
    if judgement is not None:
        return read(judgement) or 0.0
    if judge is None:
        raise EvaluationError(f"{metric}: a judge decides this metric. Pass judge=, or judgement= with a reply.")
    return ask(judge, prompt, read).score
