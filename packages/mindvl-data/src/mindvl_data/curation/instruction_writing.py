# SPDX-License-Identifier: Apache-2.0
"""New questions with answers about the images of records, for capabilities that lack data (paper, appendix B.3: targeted
instruction data from category guidelines).

Comes after classification.py; judging.py and verification.py check the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mindvl_data.curation.dialogue import Language
from mindvl_data.curation.endpoint import Endpoint, EndpointConfig, Question, Reply, check_endpoint
from mindvl_data.curation.model_replies import json_value
from mindvl_data.curation.prompt_texts import check_prompts, default_prompt, filled, prompt_for
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Outcome, Step
from mindvl_data.errors import SampleError


@dataclass(frozen=True, kw_only=True)
class WriteInstructions:
    """Parameters of `write_instructions`.

    Attributes:
        endpoint: The model that writes.
        guidelines: Capability -> guideline: what its questions and answers should be like.
        fact: Fact with the capability of a record; others than those in `guidelines` are not used.
        count: Questions per record.
        language: Language of the questions: en, zh, or that of each record (fact `language`).
        prompt_en, prompt_zh: Prompts with {count}, {capability} and {guideline}, after the images.
        max_tokens: Longest reply.
    """

    endpoint: EndpointConfig
    guidelines: dict[str, str]
    fact: str = "capability"
    count: int = 2
    language: Language = "record"
    prompt_en: str = default_prompt("instruct", "en")
    prompt_zh: str = default_prompt("instruct", "zh")
    max_tokens: int = 2048

    def __post_init__(self) -> None:
        check_prompts(self, "count", "capability", "guideline")
        if not self.guidelines:
            raise ValueError("guidelines: is empty. Name at least one capability.")
        if self.count < 1:
            raise ValueError(f"count: must be at least 1, got {self.count}. Correct it.")


@Step(
    config=WriteInstructions,
    summary="Add questions with answers about the images, which a model writes for chosen capabilities.",
    section="B.3",
    needs=("image",),
    gives=("generated", "answer_by"),
    prepare=lambda config, context: check_endpoint(config.endpoint),
)
def write_instructions(records: list[Record], config: WriteInstructions, context: Context) -> Sequence[Outcome]:
    """Add records with new questions and answers about the images of a record (paper, appendix B.3)."""

    def question(record: Record) -> Question | None:
        capability = record.facts.get(config.fact)
        if capability not in config.guidelines or not record.media:
            return None
        prompt = filled(
            prompt_for(record, config),
            count=str(config.count), capability=str(capability), guideline=config.guidelines[capability],
        )  # fmt: skip
        return Question([*record.media, prompt], config.max_tokens)

    replies = Endpoint.of(config.endpoint, context).ask_each(records, question)
    return [
        record.with_facts(generated=False) if reply is None else _extended(record, reply, config)
        for record, reply in zip(records, replies, strict=True)
    ]


def _extended(record: Record, reply: Reply, config: WriteInstructions) -> list[Record]:
    """The record and one record for each question."""
    found = json_value(reply)
    if not isinstance(found, list) or len(found) != config.count:
        raise SampleError(f"the reply of the model is not a list of {config.count} questions: {reply.text[:150]!r}")
    records = [record.with_facts(generated=False)]
    for entry in found:
        if not isinstance(entry, dict) or set(entry) != {"question", "answer"}:
            raise SampleError(f"an entry does not have a question and an answer: {entry!r:.150}")
        texts = [entry["question"], entry["answer"]]
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise SampleError(f"a question or an answer is empty: {entry!r:.150}")
        content = [*({"type": "image"} for _ in record.media), {"type": "text", "text": texts[0].strip()}]
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": texts[1].strip()}]
        kept = {name: value for name, value in record.body.items() if name not in ("messages", "content")}
        new = Record(
            number=record.number, piece=record.piece, id=record.id, body={**kept, "messages": messages}, media=record.media,
            facts={name: record.facts[name] for name in (config.fact, "language", "modality") if name in record.facts},
        )  # fmt: skip
        records.append(new.with_facts(generated=True, answer_by=config.endpoint.model))
    return records
