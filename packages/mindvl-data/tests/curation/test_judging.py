# SPDX-License-Identifier: Apache-2.0
"""Scores with reasons; the model is a small local server."""

import json
from typing import Any

import pytest

from mindvl_data.curation.endpoint import EndpointConfig
from mindvl_data.curation.judging import INSTRUCTION, INTERLEAVED, JudgeInstruction, JudgeInterleaved, judge
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Drop, find_step
from mindvl_data.errors import SampleError


def _reply(names: Any, **changed: int) -> str:
    return json.dumps({name: {"score": changed.get(name, 4), "reason": f"because of {name}"} for name in names})


def _config(chat_server: Any, kind: type = JudgeInterleaved, **fields: Any) -> Any:
    return kind(endpoint=EndpointConfig(url=chat_server.url, model="judge"), **fields)


def _text(body: dict[str, Any]) -> str:
    content = body["messages"][-1]["content"]
    return content if isinstance(content, str) else "\n".join(part.get("text", "IMAGE") for part in content)


def _document(number: int, text: str) -> Record:
    return Record(number=number, id=str(number), body={"content": text})


def test_a_low_score_drops_with_its_reason_and_all_scores_become_facts(chat_server: Any, context: Context) -> None:
    chat_server.answer = lambda body: _reply(INTERLEAVED, complementarity=2 if "poor" in _text(body) else 3)
    kept, dropped = judge([_document(0, "good text"), _document(1, "poor text")], _config(chat_server), context)
    assert isinstance(kept, Record)
    assert kept.facts["complementarity_score"] == 3
    assert kept.facts["information_density_reason"] == "because of information_density"
    assert isinstance(dropped, Drop)
    assert (dropped.reason, dropped.value) == ("low_score", "complementarity 2: because of complementarity")
    assert dropped.facts["complementarity_score"] == 2


def test_a_poor_answer_to_a_good_question_is_kept_for_reannotation(chat_server: Any, context: Context) -> None:
    chat_server.answer = lambda body: _reply(INSTRUCTION, answer_quality=1)
    (kept,) = judge([_document(0, "x")], _config(chat_server, JudgeInstruction), context)
    assert isinstance(kept, Record)
    assert kept.facts["answer_quality_score"] == 1
    chat_server.answer = lambda body: _reply(INSTRUCTION, question_quality=2)
    (dropped,) = judge([_document(0, "y")], _config(chat_server, JudgeInstruction), context)
    assert isinstance(dropped, Drop)


def test_the_prompt_has_the_sample_in_order_the_dimensions_and_the_language(
    chat_server: Any, context: Context, small_png: bytes
) -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "image"}, "Why?"]}, {"role": "assistant", "content": "So."}]
    }
    record = Record(number=0, id="0", body=body, media=(small_png,))
    chat_server.answer = lambda body: _reply(["depth"])
    judge([record], _config(chat_server, dimensions={"depth": "Deep {thoughts}."}, min_scores={}), context)
    text = _text(chat_server.requests[0])
    assert text.startswith("[user]\nIMAGE\nWhy?\n[assistant]\nSo.\n")
    assert "- depth: Deep {thoughts}." in text
    assert '{"depth": {"score": 3, "reason": "..."}}' in text
    assert text.isascii()
    chinese = record.with_facts(language="zh")
    judge([chinese], _config(chat_server, dimensions={"depth": "Deep."}, min_scores={}), context)
    assert not _text(chat_server.requests[1]).isascii()


def test_a_reply_of_another_form_fails_after_all_others_were_asked(chat_server: Any, context: Context) -> None:
    chat_server.answer = lambda body: "Good." if "bad" in _text(body) else _reply(INTERLEAVED)
    config = _config(chat_server)
    records = [_document(0, "bad"), _document(1, "fine"), _document(2, "also fine")]
    with pytest.raises(SampleError, match="not JSON"):
        judge(records, config, context)
    assert len(chat_server.requests) == 3
    for record in records[1:]:  # as the frame does; the answers are known
        judge([record], config, context)
    with pytest.raises(SampleError, match="not JSON"):
        judge(records[:1], config, context)
    assert len(chat_server.requests) == 3


def test_a_record_with_too_many_images_is_not_sent(chat_server: Any, context: Context, small_png: bytes) -> None:
    record = Record(number=0, id="0", body={"content": [{"type": "image"}] * 3}, media=(small_png,) * 3)
    with pytest.raises(SampleError, match="has 3 images, more than max_images: 2"):
        judge([record], _config(chat_server, max_images=2), context)
    assert chat_server.requests == []


def test_wrong_parameters_name_their_field(chat_server: Any) -> None:
    with pytest.raises(ValueError, match="min_scores: depth: 3"):
        _config(chat_server, min_scores={"depth": 3})
    with pytest.raises(ValueError, match="prompt_zh:"):
        _config(chat_server, prompt_zh="Judge.")
    with pytest.raises(ValueError, match="language:"):
        _config(chat_server, language="fr")
    assert find_step("judge_interleaved").section == "B.2.1"
