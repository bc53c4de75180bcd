# SPDX-License-Identifier: Apache-2.0
"""New captions and answers; the model is a small local server. Also whole pipelines with steps that ask it."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from mindvl_data.curation.class_sampling import SampleByClass
from mindvl_data.curation.config import CurationConfig, InputConfig, LimitsConfig, StepConfig
from mindvl_data.curation.endpoint import EndpointConfig
from mindvl_data.curation.judging import JudgeInstruction
from mindvl_data.curation.pipeline import curate
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
from mindvl_data.curation.verification import ApplyVerification, VerificationQueue
from mindvl_data.errors import DataError, SampleError


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


def _pipeline(tmp_path: Path, chat_server: Any, out: str, **limits: Any) -> CurationConfig:
    """Judge, write poor answers anew, apply decisions of people, queue the rest, and sample by the new scores."""
    endpoint = EndpointConfig(url=chat_server.url, model="m", concurrency=4, cache=tmp_path / "answers")
    steps = (
        ("judge_instruction", JudgeInstruction(endpoint=endpoint)),
        ("reannotate", Reannotate(endpoint=endpoint, min_facts={"question_quality_score": 3})),
        ("apply_verification", ApplyVerification(decisions=tmp_path / "decisions.jsonl")),
        ("verification_queue", VerificationQueue(directory=tmp_path / f"{out}-queue")),
        ("sample_by_class", SampleByClass(fact="answer_quality_score", quotas={"5": 3, "1": 100})),
    )
    return CurationConfig(
        name="data",
        inputs=(InputConfig(path=str(tmp_path / "in.jsonl"), format="jsonl"),),
        steps=tuple(StepConfig(step=name, parameters=parameters) for name, parameters in steps),
        out=tmp_path / out,
        limits=LimitsConfig(**limits),
    )


@pytest.mark.slow
def test_a_pipeline_asks_each_question_once_and_waits_for_people(chat_server: Any, tmp_path: Path) -> None:
    lines = []
    for number in range(12):
        kind = "hopeless" if number == 11 else "unclear" if number == 10 else "poor" if number % 3 == 0 else "good"
        turns = [("user", f"{kind} question {number}?"), ("assistant", f"old {number}")]
        lines.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def answer(body: dict[str, Any]) -> str:
        text = body["messages"][-1]["content"]
        if "judged" not in text:
            return f"new answer to: {text}"
        scores = {"image_quality": 4, "question_quality": 1 if "unclear" in text else 4}
        scores["answer_quality"] = 1 if "poor" in text else 5
        reply = {name: {"score": score, "reason": "so"} for name, score in scores.items()}
        return "I would not score this." if "hopeless" in text else json.dumps(reply)

    chat_server.answer = answer
    chat_server.delay_s = 1.5
    # 12 records with 4 requests at a time take longer than the limit of a record, which does not count waiting
    first = curate(_pipeline(tmp_path, chat_server, "first", seconds_per_record=4.0)).manifest
    judge, reannotated, applied, queued, sampled = first["steps"]
    assert (judge["in"], judge["out"], judge["dropped"]) == (12, 10, {"low_score": 1})
    assert sum(judge["quarantined"].values()) == 1
    assert (reannotated["out"], applied["out"], queued["dropped"]) == (10, 10, {"not_verified": 4})  # 0, 3, 6 and 9
    assert sampled["dropped"] == {"over_share": 3}  # three of the six good ones
    assert len(chat_server.requests) == 12 + 4

    chat_server.delay_s = 0.0
    queue = [json.loads(line) for line in (tmp_path / "first-queue" / "queue.jsonl").read_text().splitlines()]
    assert [line["answer"] for line in queue] == [f"new answer to: poor question {number}?" for number in (0, 3, 6, 9)]
    decided = [
        {**queue[0], "decision": "accept", "by": "Anna"},
        {**queue[1], "decision": "edit", "by": "Anna", "edited_answer": "corrected"},
        {**queue[2], "decision": "reject", "by": "Bo"},
    ]
    (tmp_path / "decisions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in decided))
    second = curate(_pipeline(tmp_path, chat_server, "second"), workers=2).manifest
    assert len(chat_server.requests) == 12 + 4  # every answer is known
    assert [step["dropped"] for step in second["steps"][2:4]] == [{"rejected": 1}, {"not_verified": 1}]
    with tarfile.open(next((tmp_path / "second" / "shards").glob("*.tar"))) as tar:
        bodies = [json.load(tar.extractfile(name)) for name in tar.getnames() if name.endswith(".json")]  # type: ignore[arg-type]
    verified = {
        body["messages"][-1]["content"]: body["meta"] for body in bodies if "verification" in body["meta"]["curation"]
    }
    assert set(verified) == {"new answer to: poor question 0?", "corrected"}
    assert verified["corrected"]["curation"]["verified_by"] == "Anna"
    assert verified["corrected"]["replaced_answer"] == "old 3"


@pytest.mark.slow
def test_a_budget_stops_a_pipeline_and_more_budget_continues_it(chat_server: Any, tmp_path: Path) -> None:
    lines = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}]} for n in range(9)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chat_server.answer = lambda body: "b"

    def config(budget: int) -> CurationConfig:
        endpoint = EndpointConfig(url=chat_server.url, model="m", budget_requests=budget)
        return CurationConfig(
            name="data",
            inputs=(InputConfig(path=str(tmp_path / "in.jsonl"), format="jsonl"),),
            steps=(StepConfig(step="rewrite_answers", parameters=RewriteAnswers(endpoint=endpoint)),),
            out=tmp_path / "out",
        )

    with pytest.raises(DataError, match="budget_requests: 5 of 5 are used"):
        curate(config(5))
    assert len(chat_server.requests) == 5
    assert curate(config(9)).manifest["counts"]["written"] == 9
    assert len(chat_server.requests) == 9
