# SPDX-License-Identifier: Apache-2.0
"""New questions and answers for chosen capabilities; the model is a small local server."""

import json
from typing import Any

import pytest

from mindvl_data.curation.endpoint import EndpointConfig
from mindvl_data.curation.instruction_writing import WriteInstructions, write_instructions
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context
from mindvl_data.errors import SampleError


def _config(chat_server: Any) -> WriteInstructions:
    endpoint = EndpointConfig(url=chat_server.url, model="writer")
    return WriteInstructions(endpoint=endpoint, guidelines={"counting": "Ask for numbers of objects."})


def _record(number: int, image: bytes, capability: str) -> Record:
    body = {"content": [{"type": "image"}, "alt text"], "url": "u"}
    return Record(number=number, id=str(number), body=body, media=(image,), facts={"capability": capability})


def test_records_of_named_capabilities_get_questions_and_stay(
    chat_server: Any, context: Context, small_png: bytes
) -> None:
    entries = [{"question": "How many squares?", "answer": "One."}, {"question": "How many dogs?", "answer": "None."}]
    chat_server.answer = lambda body: json.dumps(entries)
    records = [_record(0, small_png, "counting"), _record(1, small_png, "ocr")]
    made, other = write_instructions(records, _config(chat_server), context)
    assert isinstance(made, list)
    assert isinstance(other, Record)
    assert other.facts["generated"] is False
    assert made[0] == records[0].with_facts(generated=False)
    assert [new.texts() for new in made[1:]] == [["How many squares?", "One."], ["How many dogs?", "None."]]
    assert made[1].body["messages"][0]["content"][0] == {"type": "image"}
    assert (made[1].body["url"], made[1].media) == ("u", (small_png,))
    assert made[1].facts == {"capability": "counting", "generated": True, "answer_by": "writer"}
    (request,) = chat_server.requests
    prompt = request["messages"][0]["content"][1]["text"]
    assert "counting: Ask for numbers of objects." in prompt
    assert '[{"question": "...", "answer": "..."}]' in prompt


@pytest.mark.parametrize(
    "reply",
    [
        "[]",
        '[{"question": "a", "answer": "b"}]',
        '[{"question": "a", "answer": "b"}, {"question": "a"}]',
        '[{"question": "a", "answer": "b"}, {"question": "a", "answer": " "}]',
        '{"question": "a", "answer": "b"}',
    ],
)
def test_a_reply_of_another_form_is_a_failed_record(
    reply: str, chat_server: Any, context: Context, small_png: bytes
) -> None:
    chat_server.answer = lambda body: reply
    with pytest.raises(SampleError, match=r"list of 2|question or an answer|question and an answer"):
        write_instructions([_record(0, small_png, "counting")], _config(chat_server), context)
