# SPDX-License-Identifier: Apache-2.0
"""Metrics that a judge model decides: MM-Vet, Chinese SimpleQA and Arena-Hard.

The prompts are ours; record them with the score, because another wording or judge gives another number. A judgement that
cannot be read is a failed item with the score 0, never a guess.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindvl_merge.errors import EvaluationError, RequestRefusedError
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
_STRONG_WEIGHT = 3  # games that a verdict of "much better" counts for, as in the evaluation code of Arena-Hard
_LETTER = re.compile(r"(?<![A-Za-z])[ABC](?![A-Za-z])")

Read = Callable[[str], float | None]  # score of a reply from 0 to 1, None if it cannot be read


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The result of a judge for one prompt."""

    score: float  # from 0 to 1; 0 for a failed judgement
    is_failed: bool
    prompt: str
    reply: str  # last reply, or why the judge refuses the prompt


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The score of one item, and the judgements that it follows from."""

    score: float
    judgements: tuple[Judgement, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)  # for metrics.aggregate

    @property
    def is_failed(self) -> bool:
        """Whether a judgement failed."""
        return any(judgement.is_failed for judgement in self.judgements)


def ask(judge: Judge, prompt: str, read: Read, *, num_tries: int = NUM_TRIES) -> Judgement:
    """Ask until a reply can be read, at most `num_tries` times; a refused prompt is a failed judgement."""
    reply = ""
    for _ in range(num_tries):
        try:
            reply = judge(prompt)
        except RequestRefusedError as error:
            reply = str(error)
            break
        score = read(reply)
        if score is not None:
            return Judgement(score=score, is_failed=False, prompt=prompt, reply=reply)
    return Judgement(score=0.0, is_failed=True, prompt=prompt, reply=reply)


def judge_item(
    metric: str, prediction: str, references: Sequence[str], compat: Compat, *, question: str = "", judge: Judge
) -> Judged:
    """Score and judgements of an item.

    Args:
        metric: `mmvet`, `simpleqa` or `arena_hard`.
    """
    if metric == "mmvet":
        reference = references[0].replace("<AND>", " <AND> ").replace("<OR>", " <OR> ")
        prompt = MMVET_PROMPT.format(question=question, reference=reference, prediction=prediction)
        found = ask(judge, prompt, lambda reply: read_grade(reply, compat))
        return Judged(score=found.score, judgements=(found,))
    if metric == "simpleqa":
        prompt = SIMPLEQA_PROMPT.format(question=question, reference=" / ".join(references), prediction=prediction)
        found = ask(judge, prompt, _read_letter)
        is_attempted = found.is_failed or _letter(found.reply) != "C"
        return Judged(score=found.score, judgements=(found,), fields={"attempted": is_attempted})
    prompts = (
        ARENA_PROMPT.format(question=question, first=prediction, second=references[0]),
        ARENA_PROMPT.format(question=question, first=references[0], second=prediction),
    )
    games = tuple(
        ask(judge, prompt, read) for prompt, read in zip(prompts, (read_verdict, _swapped_verdict), strict=True)
    )
    weights = [1 if game.is_failed else verdict_weight(game.reply) for game in games]
    won = sum(weight * game.score for weight, game in zip(weights, games, strict=True))
    return Judged(score=won / sum(weights), judgements=games, fields={"weight": sum(weights)})


def mmvet(prediction: str, references: Sequence[str], compat: Compat, **options: Any) -> float:
    """Grade from 0 to 1 by a judge; lmms-eval reads the first word of a reply, the others the whole reply.

    Args:
        options: `judge`, which answers the prompt; `question`; or `judgement`, a reply that is already there.
    """
    return _score("mmvet", prediction, references, compat, lambda reply: read_grade(reply, compat), **options)


def read_grade(reply: str, compat: Compat) -> float | None:
    """A number from 0 to 1, or None."""
    text = reply.strip().split(" ")[0] if compat == "lmms-eval" else reply
    try:
        grade = float(text)
    except ValueError:
        return None
    return grade if math.isfinite(grade) and 0 <= grade <= 1 else None


def simpleqa(prediction: str, references: Sequence[str], compat: Compat, **options: Any) -> float:
    """1.0 if the first letter A, B or C of the judge's reply that stands alone is A; options as for `mmvet`."""
    return _score("simpleqa", prediction, references, compat, _read_letter, **options)


def _letter(reply: str) -> str | None:
    found = _LETTER.search(reply)
    return found.group() if found else None


def _read_letter(reply: str) -> float | None:
    letter = _letter(reply)
    return None if letter is None else float(letter == "A")


def arena_hard(prediction: str, references: Sequence[str], compat: Compat, **options: Any) -> float:
    """Weighted share of wins against the baseline's reply (the reference) in both orders; a tie is one half."""
    return _score("arena_hard", prediction, references, compat, read_verdict, **options)


def read_verdict(reply: str) -> float | None:
    """1.0 if assistant A wins, 0.5 for a tie, None if the reply has no verdict or two different ones."""
    verdicts = set(_VERDICT.findall(reply))
    return _WINS[verdicts.pop()] if len(verdicts) == 1 else None


def verdict_weight(reply: str) -> int:
    """Number of games that a verdict counts for."""
    return _STRONG_WEIGHT if any(">>" in verdict for verdict in _VERDICT.findall(reply)) else 1


def _swapped_verdict(reply: str) -> float | None:
    won = read_verdict(reply)
    return None if won is None else 1.0 - won


def _score(
    metric: str,
    prediction: str,
    references: Sequence[str],
    compat: Compat,
    read: Read,
    *,
    question: str = "",
    judge: Judge | None = None,
    judgement: str | None = None,
    **_: Any,
) -> float:
    if judgement is not None:
        return read(judgement) or 0.0
    if judge is None:
        raise EvaluationError(f"{metric}: a judge decides this metric. Pass judge=, or judgement= with a reply.")
    return judge_item(metric, prediction, references, compat, question=question, judge=judge).score
