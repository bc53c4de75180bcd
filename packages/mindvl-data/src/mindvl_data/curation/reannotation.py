# SPDX-License-Identifier: Apache-2.0
"""New captions and answers from a model behind an endpoint: re-captions (paper, B.1.1), answers to good questions with a
poor answer (B.3), and answers in one style (B.1.6).

A replaced text is kept in the field `replaced_answer`, which the output writer moves to `meta`. Comes after the steps that
measure relevance and quality; verification.py shows the result to people.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mindvl_data.curation.dialogue import Language, answer, turns, with_answer
from mindvl_data.curation.endpoint import Endpoint, EndpointConfig, Question, Reply, check_endpoint
from mindvl_data.curation.model_replies import complete_text
from mindvl_data.curation.prompt_texts import check_prompts, default_prompt, filled, prompt_for
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Outcome, Step
from mindvl_data.errors import SampleError

_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")


@dataclass(frozen=True, kw_only=True)
class Recaption:
    """Parameters of `recaption`.

    Attributes:
        endpoint: The model that writes captions.
        fact: Fact of an earlier step that measures how relevant the text is to the image.
        below: Records whose fact is lower get a new caption. Default: 0.28, the lowest CLIP similarity (ViT-B/32) of
            LAION-2B-en.
        language: Language of the caption: en, zh, or that of each record (fact `language`).
        prompt_en, prompt_zh: Prompts, after the image.
        max_tokens: Longest caption; a caption that is cut is a failed record.
    """

    endpoint: EndpointConfig
    fact: str = "clip_similarity"
    below: float = 0.28
    language: Language = "record"
    prompt_en: str = default_prompt("recaption", "en")
    prompt_zh: str = default_prompt("recaption", "zh")
    max_tokens: int = 512

    def __post_init__(self) -> None:
        check_prompts(self)


@Step(
    config=Recaption,
    summary="Replace texts of low relevance to their image with captions of a model.",
    section="B.1.1",
    needs=("image", "text"),
    gives=("recaptioned", "answer_by"),
    prepare=lambda config, context: check_endpoint(config.endpoint),
)
def recaption(records: list[Record], config: Recaption, context: Context) -> Sequence[Outcome]:
    """Replace the text of pairs of low image-text relevance by a caption of a model (paper, appendix B.1.1)."""

    def question(record: Record) -> Question | None:
        if _number(record, config.fact) >= config.below:
            return None
        answer(record)  # fails before anything is paid for
        if len(record.media) != 1:
            raise SampleError(f"a pair has one image, the record has {len(record.media)} media")
        return Question([record.media[0], prompt_for(record, config)], config.max_tokens)

    replies = Endpoint.of(config.endpoint, context).ask_each(records, question)
    return [_replaced(*pair, config.endpoint, "recaptioned") for pair in zip(records, replies, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Reannotate:
    """Parameters of `reannotate`.

    Attributes:
        endpoint: The model that answers.
        min_facts: Fact -> minimum value. Only records that reach all minimums, that is, with a good image and question, get a
            new answer.
        answer_fact: Fact with the quality of the answer.
        below: Records whose `answer_fact` is lower get a new answer.
        language: Language of the answer: en, zh, or that of each record (fact `language`).
        prompt_en, prompt_zh: System messages in English and Chinese.
        max_tokens: Longest answer; an answer that is cut is a failed record.
    """

    endpoint: EndpointConfig
    min_facts: dict[str, float]
    answer_fact: str = "answer_quality_score"
    below: float = 3
    language: Language = "record"
    prompt_en: str = default_prompt("answer", "en")
    prompt_zh: str = default_prompt("answer", "zh")
    max_tokens: int = 2048

    def __post_init__(self) -> None:
        check_prompts(self)


@Step(
    config=Reannotate,
    summary="Replace poor answers to good questions with answers of a model.",
    section="B.3",
    needs=("text",),
    gives=("reannotated", "answer_by"),
    prepare=lambda config, context: check_endpoint(config.endpoint),
)
def reannotate(records: list[Record], config: Reannotate, context: Context) -> Sequence[Outcome]:
    """Write poor answers to good questions anew (paper, appendix B.3)."""

    def question(record: Record) -> Question | None:
        is_poor = _number(record, config.answer_fact) < config.below
        if not is_poor or any(_number(record, name) < least for name, least in config.min_facts.items()):
            return None
        answer(record)
        *history, _ = turns(record)
        if not history or history[-1][0] != "user":
            raise SampleError("the record has no question before its answer")
        system = [str(part) for role, parts in history if role == "system" for part in parts]
        before = [turn for turn in history[:-1] if turn[0] != "system"]
        return Question(
            history[-1][1], config.max_tokens, system="\n\n".join([prompt_for(record, config), *system]), history=before
        )

    replies = Endpoint.of(config.endpoint, context).ask_each(records, question)
    return [_replaced(*pair, config.endpoint, "reannotated") for pair in zip(records, replies, strict=True)]


@dataclass(frozen=True, kw_only=True)
class RewriteAnswers:
    """Parameters of `rewrite_answers`.

    Attributes:
        endpoint: The model that rewrites; it needs no images. The paper uses Qwen2.5-7B-Instruct.
        language: Language of the prompt: en, zh, or that of each record (fact `language`).
        prompt_en, prompt_zh: Prompts with {question} and {answer}.
        max_tokens: Longest answer; an answer that is cut is a failed record.
    """

    endpoint: EndpointConfig
    language: Language = "record"
    prompt_en: str = default_prompt("rewrite", "en")
    prompt_zh: str = default_prompt("rewrite", "zh")
    max_tokens: int = 1024

    def __post_init__(self) -> None:
        check_prompts(self, "question", "answer")


@Step(
    config=RewriteAnswers,
    summary="Rewrite answers in one style without changing their numbers.",
    section="B.1.6",
    needs=("text",),
    gives=("rewritten", "answer_by"),
    prepare=lambda config, context: check_endpoint(config.endpoint),
)
def rewrite_answers(records: list[Record], config: RewriteAnswers, context: Context) -> Sequence[Outcome]:
    """Rewrite the last answer in one style (paper, appendix B.1.6).

    A rewritten answer with other numbers, for example coordinates, is not used: the old one stays (`rewritten: false`).
    """

    def question(record: Record) -> Question:
        old = answer(record)
        asked = [turn for turn in turns(record) if turn[0] == "user"][-1:]
        text = "\n".join(part for _, parts in asked for part in parts if isinstance(part, str))
        return Question([filled(prompt_for(record, config), question=text, answer=old)], config.max_tokens)

    outcomes: list[Outcome] = []
    for record, reply in zip(records, Endpoint.of(config.endpoint, context).ask_each(records, question), strict=True):
        assert reply is not None
        is_faithful = _numbers(complete_text(reply)) == _numbers(answer(record))
        outcomes.append(_replaced(record, reply if is_faithful else None, config.endpoint, "rewritten"))
    return outcomes


def _number(record: Record, fact: str) -> float:
    value = record.facts.get(fact)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SampleError(f"the record has no number {fact!r}; put the step that measures it before this one")
    return value


def _numbers(text: str) -> Counter[str]:
    return Counter(_NUMBER.findall(text))


def _replaced(record: Record, reply: Reply | None, endpoint: EndpointConfig, fact: str) -> Record:
    if reply is None:
        return record.with_facts(**{fact: False})
    changed = with_answer(record, complete_text(reply))
    changed = changed.with_body(replaced_answer=record.body.get("replaced_answer", answer(record)))
    return changed.with_facts(**{fact: True, "answer_by": endpoint.model})
