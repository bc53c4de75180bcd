# SPDX-License-Identifier: Apache-2.0
"""New captions and answers; the model is a small local server."""

from typing import Any

import pytest

from mindvl_data.curation.endpoint import EndpointConfig
from mindvl_data.curation.reannotation import (
    Reannotate,
    Recaption,
    RewriteAnswers,
    reannotate,
    recaption,
    rewrite_answers,
)
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context
from mindvl_data.errors import SampleError


def _endpoint(chat_server: Any) -> EndpointConfig:
    return EndpointConfig(url=chat_server.url, model="writer")


def _pair(number: int, image: bytes, **facts: Any) -> Record:
    body = {"content": [{"type": "image"}, {"type": "text", "text": f"alt text {number}"}]}
    return Record(number=number, id=str(number), body=body, media=(image,), facts=facts)


def test_only_pairs_of_low_relevance_get_a_new_caption(chat_server: Any, context: Context, small_png: bytes) -> None:
    chat_server.answer = lambda body: " A red square. "
    records = [_pair(0, small_png, clip_similarity=0.28), _pair(1, small_png, clip_similarity=0.2799)]
    kept, changed = recaption(records, Recaption(endpoint=_endpoint(chat_server)), context)
    assert isinstance(kept, Record)
    assert isinstance(changed, Record)
    assert (kept.texts(), kept.facts["recaptioned"]) == (["alt text 0"], False)
    assert changed.texts() == ["A red square."]
    assert changed.body["replaced_answer"] == "alt text 1"
    assert (changed.facts["recaptioned"], changed.facts["answer_by"]) == (True, "writer")
    assert len(chat_server.requests) == 1
    image, prompt = chat_server.requests[0]["messages"][0]["content"]
    assert image["type"] == "image_url"
    assert prompt["text"].startswith("Describe this image")


def test_a_chinese_pair_is_captioned_in_chinese(chat_server: Any, context: Context, small_png: bytes) -> None:
    record = _pair(0, small_png, clip_similarity=0.1, language="zh")
    recaption([record], Recaption(endpoint=_endpoint(chat_server)), context)
    assert not chat_server.requests[0]["messages"][0]["content"][1]["text"].isascii()


def test_a_pair_without_the_fact_fails_and_the_others_are_asked(
    chat_server: Any, context: Context, small_png: bytes
) -> None:
    with pytest.raises(SampleError, match="no number 'clip_similarity'"):
        recaption(
            [_pair(0, small_png), _pair(1, small_png, clip_similarity=0)],
            Recaption(endpoint=_endpoint(chat_server)),
            context,
        )
    assert len(chat_server.requests) == 1


def _question(number: int, image: int, question: int, answer: int) -> Record:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": f"First {number}?"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "dunno"},
    ]
    facts = {"image_quality_score": image, "question_quality_score": question, "answer_quality_score": answer}
    return Record(number=number, id=str(number), body={"messages": messages}, facts=facts)


def test_only_poor_answers_to_good_questions_are_written_anew(chat_server: Any, context: Context) -> None:
    chat_server.answer = lambda body: "Two."
    config = Reannotate(
        endpoint=_endpoint(chat_server), min_facts={"image_quality_score": 3, "question_quality_score": 4}
    )
    scores = [(3, 4, 2), (3, 4, 3), (2, 5, 1), (5, 3, 1)]
    outcomes = reannotate([_question(number, *each) for number, each in enumerate(scores)], config, context)
    answers = [outcome.answers()[-1] for outcome in outcomes if isinstance(outcome, Record)]
    assert answers == ["Two.", "dunno", "dunno", "dunno"]
    assert [outcome.facts["reannotated"] for outcome in outcomes if isinstance(outcome, Record)] == [
        True,
        False,
        False,
        False,
    ]
    (request,) = chat_server.requests
    system, *others = request["messages"]
    assert system["content"].startswith("Answer the last question")
    assert system["content"].endswith("\n\nBe kind.")
    assert [(turn["role"], turn["content"]) for turn in others] == [
        ("user", "First 0?"), ("assistant", "One."), ("user", "And then?"),
    ]  # fmt: skip


def test_an_answer_that_is_cut_is_a_failed_record(chat_server: Any, context: Context) -> None:
    chat_server.answer = lambda body: {"choices": [{"message": {"content": "Tw"}, "finish_reason": "length"}]}
    config = Reannotate(endpoint=_endpoint(chat_server), min_facts={})
    with pytest.raises(SampleError, match="was cut"):
        reannotate([_question(0, 5, 5, 1)], config, context)


def test_a_rewritten_answer_is_used_only_if_its_numbers_are_the_same(chat_server: Any, context: Context) -> None:
    def answer(body: dict[str, Any]) -> str:
        return "Click at (12, 40)." if "faithful" in body["messages"][0]["content"] else "Click at (12, 41)."

    chat_server.answer = answer
    records = [
        Record(
            number=number,
            id=str(number),
            body={
                "messages": [
                    {"role": "user", "content": f"Where is the button? {word}"},
                    {"role": "assistant", "content": "the button, it be at (12, 40)"},
                ]
            },
        )
        for number, word in enumerate(("faithful", "careless"))
    ]
    first, second = rewrite_answers(records, RewriteAnswers(endpoint=_endpoint(chat_server)), context)
    assert isinstance(first, Record)
    assert isinstance(second, Record)
    assert (first.answers(), first.facts["rewritten"]) == (["Click at (12, 40)."], True)
    assert (second.answers(), second.facts["rewritten"]) == (["the button, it be at (12, 40)"], False)
    assert "replaced_answer" not in second.body
    assert all(isinstance(request["messages"][0]["content"], str) for request in chat_server.requests)
