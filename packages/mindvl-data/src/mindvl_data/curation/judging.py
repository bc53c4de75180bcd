# SPDX-License-Identifier: Apache-2.0
"""Scores with reasons in several dimensions, given by a model behind an endpoint (paper, appendix B.2.1 and B.3).

Two steps of one function: `judge_interleaved` for interleaved image-text data, and `judge_instruction`, whose scores say
which records have a good image and question but a poor answer (reannotation.py).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mindvl_data.curation.dialogue import Language, Parts, turns
from mindvl_data.curation.endpoint import Endpoint, EndpointConfig, Question, check_endpoint
from mindvl_data.curation.model_replies import scores
from mindvl_data.curation.prompt_texts import check_prompts, default_prompt, filled, prompt_for
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Drop, Outcome, Step
from mindvl_data.errors import SampleError

LOW, HIGH = 1, 5  # scores

INTERLEAVED = {
    "question_answer_quality": "Texts, or questions and answers, are clear, correct, complete and well written.",
    "image_question_relevance": "The images belong to the texts or questions next to them.",
    "complementarity": "Images, texts, questions and answers each add something that the others lack.",
    "information_density": "Images and texts carry balanced information, without filler and decoration.",
}
INSTRUCTION = {
    "image_quality": "The images are sharp, complete and show what the question asks about.",
    "question_quality": "The question is clear, answerable, and useful for training.",
    "answer_quality": "The last answer is correct, complete, grounded in the images and well written.",
}


@dataclass(frozen=True, kw_only=True)
class JudgeInterleaved:
    """Parameters of `judge_interleaved`.

    Attributes:
        endpoint: The model that judges.
        dimensions: Name -> description; a score is the fact `NAME_score` and its reason the fact `NAME_reason`.
        min_scores: Name -> lowest score that is kept, from 1 to 5; dimensions that are not named drop nothing.
        language: Language of the prompt: en, zh, or that of each record (fact `language`).
        prompt_en, prompt_zh: Prompts with {dimensions} and {form}, after the sample.
        max_images: Records with more images fail.
        max_tokens: Longest reply.
    """

    endpoint: EndpointConfig
    dimensions: dict[str, str] = field(default_factory=lambda: dict(INTERLEAVED))
    min_scores: dict[str, int] = field(default_factory=lambda: dict.fromkeys(INTERLEAVED, 3))
    language: Language = "record"
    prompt_en: str = default_prompt("judge", "en")
    prompt_zh: str = default_prompt("judge", "zh")
    max_images: int = 16
    max_tokens: int = 1024

    def __post_init__(self) -> None:
        check_prompts(self, "dimensions", "form")
        if not self.dimensions:
            raise ValueError("dimensions: is empty. Name at least one dimension.")
        for name, score in self.min_scores.items():
            if name not in self.dimensions or not LOW <= score <= HIGH:
                raise ValueError(
                    f"min_scores: {name}: {score} is not a score from {LOW} to {HIGH} of one of "
                    f"{', '.join(self.dimensions)}. Correct it."
                )


@dataclass(frozen=True, kw_only=True)
class JudgeInstruction(JudgeInterleaved):
    """Parameters of `judge_instruction`: as `judge_interleaved`; a poor answer is not dropped by default."""

    dimensions: dict[str, str] = field(default_factory=lambda: dict(INSTRUCTION))
    min_scores: dict[str, int] = field(default_factory=lambda: {"image_quality": 3, "question_quality": 3})


@Step(
    name="judge_instruction",
    config=JudgeInstruction,
    summary="Score image, question and answer of instruction data with reasons, and drop poor images and questions.",
    section="B.3",
    needs=("text",),
    gives=tuple(f"{name}_score" for name in INSTRUCTION),
    reasons={"low_score": "A dimension was scored lower than min_scores."},
    prepare=lambda config, context: check_endpoint(config.endpoint),
)
@Step(
    name="judge_interleaved",
    config=JudgeInterleaved,
    summary="Score interleaved image-text data in several dimensions with reasons, and drop records with low scores.",
    section="B.2.1",
    needs=("text", "image"),
    gives=tuple(f"{name}_score" for name in INTERLEAVED),
    reasons={"low_score": "A dimension was scored lower than min_scores."},
    prepare=lambda config, context: check_endpoint(config.endpoint),
)
def judge(records: list[Record], config: JudgeInterleaved, context: Context) -> Sequence[Outcome]:
    """Score records in several dimensions with reasons, and drop low scores (paper, appendix B.2.1 and B.3).

    A reply that is not exactly of the requested form is a failed record.
    """
    names = tuple(config.dimensions)

    def question(record: Record) -> Question:
        return Question([*sample_parts(record, config.max_images), _prompt(record, config)], config.max_tokens)

    outcomes: list[Outcome] = []
    for record, reply in zip(records, Endpoint.of(config.endpoint, context).ask_each(records, question), strict=True):
        assert reply is not None
        found = scores(reply, names, LOW, HIGH)
        facts: dict[str, Any] = {}
        for name, (score, reason) in found.items():
            facts |= {f"{name}_score": score, f"{name}_reason": reason}
        low = [name for name, least in config.min_scores.items() if found[name][0] < least]
        if low:
            score, reason = found[low[0]]
            outcomes.append(Drop("low_score", f"{low[0]} {score}: {reason}", facts))
        else:
            outcomes.append(record.with_facts(**facts))
    return outcomes


def sample_parts(record: Record, max_images: int) -> Parts:
    """The whole record as texts and images, each message after its role.

    Raises:
        SampleError: The record has more images, or cannot be shown.
    """
    if len(record.media) > max_images:
        raise SampleError(f"the record has {len(record.media)} images, more than max_images: {max_images}")
    parts: Parts = []
    for role, content in turns(record):
        parts += [f"[{role}]", *content]
    return parts


def _prompt(record: Record, config: JudgeInterleaved) -> str:
    dimensions = "\n".join(f"- {name}: {description}" for name, description in config.dimensions.items())
    form = json.dumps({name: {"score": 3, "reason": "..."} for name in config.dimensions})
    return filled(prompt_for(record, config), dimensions=dimensions, form=form)
