# SPDX-License-Identifier: Apache-2.0
"""The queue of questions for people, and their decisions."""

import json
from pathlib import Path
from typing import Any

import pytest

from mindvl_data.curation.dialogue import question_key
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Drop, find_step
from mindvl_data.curation.verification import (
    ApplyVerification,
    VerificationQueue,
    apply_verification,
    read_decisions,
)
from mindvl_data.errors import DataError

QUEUE = find_step("verification_queue")


def _record(number: int, answer: str, image: bytes, **facts: Any) -> Record:
    question = [{"type": "image"}, {"type": "text", "text": f"Question {number}?"}]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Record(number=number, id=f"data:{number}", body={"messages": messages}, media=(image,), facts=facts)


def _queue(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "queue.jsonl").read_text("utf-8").splitlines()]


def _write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_only_answers_of_models_are_queued_with_question_and_images(
    decide: Any, tmp_path: Path, small_png: bytes
) -> None:
    directory = tmp_path / "people"
    records = [
        _record(0, "by a person", small_png, reannotated=False),
        _record(1, "by a model", small_png, reannotated=True, answer_by="m"),
        _record(2, "verified", small_png, reannotated=True, verification="accepted"),
    ]
    decisions = decide(QUEUE, VerificationQueue(directory=directory), records)
    assert {number: decision.drop.reason for number, decision in decisions.items()} == {1: "not_verified"}
    (line,) = _queue(directory)
    image = line["question"][0]["parts"][0]["image"]
    assert (directory / image).read_bytes() == small_png
    assert line["question"] == [{"role": "user", "parts": [{"image": image}, "Question 1?"]}]
    assert (line["id"], line["answer"], line["facts"]["answer_by"]) == ("data:1", "by a model", "m")
    assert (line["decision"], line["by"], line["edited_answer"]) == ("", "", "")
    assert line["key"] == question_key(records[1])


def test_undecided_records_may_be_kept_and_a_share_may_be_shown(decide: Any, tmp_path: Path, small_png: bytes) -> None:
    records = [_record(number, "x", small_png, reannotated=True) for number in range(200)]
    config = VerificationQueue(directory=tmp_path / "people", undecided="keep", share=0.25)
    assert decide(QUEUE, config, records) == {}
    assert 25 < len(_queue(tmp_path / "people")) < 75


def test_the_queue_is_the_same_in_any_order_of_work_and_has_each_question_once(
    decide: Any, tmp_path: Path, small_png: bytes
) -> None:
    records = [_record(0, "a", small_png, reannotated=True), _record(1, "b", small_png, reannotated=True)]
    same = Record(number=2, id="copy", body=records[0].body, media=records[0].media, facts=records[0].facts)
    decisions = decide(QUEUE, VerificationQueue(directory=tmp_path / "one"), [*records, same])
    assert sorted(decisions) == [0, 1, 2]
    assert [line["key"] for line in _queue(tmp_path / "one")] == [question_key(record) for record in records]
    assert [line["id"] for line in _queue(tmp_path / "one")] == ["data:0", "data:1"]  # not the copy, which came last


def test_a_caption_is_shown_as_the_answer_and_not_as_the_question(
    decide: Any, tmp_path: Path, small_png: bytes
) -> None:
    body = {"content": [{"type": "image"}, {"type": "text", "text": "A red square."}]}
    record = Record(number=0, id="p", body=body, media=(small_png,), facts={"recaptioned": True})
    decide(QUEUE, VerificationQueue(directory=tmp_path, facts=("recaptioned",)), [record])
    (line,) = _queue(tmp_path)
    assert [list(part) for part in line["question"][0]["parts"]] == [["image"]]
    assert line["answer"] == "A red square."


def test_decisions_of_people_win_over_any_later_answer_of_a_model(
    decide: Any, context: Context, tmp_path: Path, small_png: bytes
) -> None:
    records = [_record(number, f"model {number}", small_png, reannotated=True) for number in range(4)]
    decide(QUEUE, VerificationQueue(directory=tmp_path), records)
    lines = _queue(tmp_path)
    decided = _write(
        tmp_path / "decided.jsonl",
        lines[0] | {"decision": "accept", "by": "Anna"},
        lines[1] | {"decision": "edit", "by": "Bo", "edited_answer": "corrected"},
        lines[2] | {"decision": "reject", "by": "Anna", "note": "blurred"},
    )
    later = [_record(number, f"newer model {number}", small_png, reannotated=True) for number in range(4)]
    first, second, third, fourth = apply_verification(later, ApplyVerification(decisions=decided), context)
    assert isinstance(first, Record)
    assert isinstance(second, Record)
    assert first.answers() == ["model 0"]
    assert (first.facts["verification"], first.facts["verified_by"]) == ("accepted", "Anna")
    assert first.body["replaced_answer"] == "newer model 0"
    assert second.answers() == ["corrected"]
    assert (second.facts["verification"], second.facts["verified_by"]) == ("edited", "Bo")
    assert third == Drop("rejected", "Anna: blurred", {"verified_by": "Anna"})
    assert fourth == later[3]
    # only the record without a decision is asked again
    waiting = [outcome for outcome in (first, second, fourth) if isinstance(outcome, Record)]
    assert sorted(decide(QUEUE, VerificationQueue(directory=tmp_path), waiting)) == [3]
    assert [line["key"] for line in _queue(tmp_path)] == [question_key(records[3])]


def test_a_missing_file_of_decisions_changes_nothing(context: Context, tmp_path: Path, small_png: bytes) -> None:
    records = [_record(0, "x", small_png)]
    assert apply_verification(records, ApplyVerification(decisions=tmp_path / "none.jsonl"), context) == records


def test_a_later_line_replaces_an_earlier_one(tmp_path: Path) -> None:
    line = {"key": "k", "decision": "accept", "answer": "a", "by": "Anna"}
    path = _write(tmp_path / "d.jsonl", line, line | {"decision": "reject", "by": "Bo"})
    assert read_decisions(path)["k"].by == "Bo"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "not a JSON object"),
        ('{"decision": "accept", "by": "A", "answer": "x"}', "key and by are required"),
        ('{"key": "k", "decision": "accept", "by": " ", "answer": "x"}', "key and by are required"),
        ('{"key": "k", "decision": "maybe", "by": "A"}', "decision: 'maybe' is not known"),
        ('{"key": "k", "decision": "edit", "by": "A", "answer": "x"}', "edited_answer: is empty"),
        ('{"key": "k", "decision": "accept", "by": "A"}', "answer: is empty"),
        ('{"key": 5, "decision": "accept", "by": "A"}', "key: must be a text"),
    ],
)
def test_a_wrong_decision_is_refused_with_its_line(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(DataError, match=message) as raised:
        read_decisions(path)
    assert f"{path}:2: " in str(raised.value)
