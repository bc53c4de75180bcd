# SPDX-License-Identifier: Apache-2.0
"""Replies of models are read strictly."""

import pytest

from mindvl_data.curation.endpoint import Reply
from mindvl_data.curation.model_replies import complete_text, json_value, one_of, scores
from mindvl_data.errors import SampleError


def _reply(text: str, finish_reason: str = "stop") -> Reply:
    return Reply(text, finish_reason, 1, 7)


def test_a_reply_that_is_cut_or_empty_is_a_failed_record() -> None:
    assert complete_text(_reply(" A cat.\n")) == "A cat."
    with pytest.raises(SampleError, match="cut after 7 tokens"):
        complete_text(_reply("A cat on", "length"))
    for text in ("", "  ", "<think>hm</think>\n"):
        with pytest.raises(SampleError, match="empty"):
            complete_text(_reply(text))


def test_reasoning_before_the_answer_is_removed() -> None:
    assert complete_text(_reply("<think>a </b> c</think>\n\nYes.")) == "Yes."


@pytest.mark.parametrize("text", ['{"a": 1}', '```json\n{"a": 1}\n```', '```\n{"a":\n1}\n```', ' {"a": 1}\n'])
def test_json_may_stand_in_one_code_block(text: str) -> None:
    assert json_value(_reply(text)) == {"a": 1}


@pytest.mark.parametrize(
    "text", ['Here: {"a": 1}', '{"a": 1} ', '{"a": 1, "a": 2}', '{"a": NaN}', "{'a': 1}", '{"a": 1', "[" * 100_000]
)
def test_anything_but_json_is_a_failed_record(text: str) -> None:
    if text.endswith(" "):
        text += "Done."
    with pytest.raises(SampleError, match="not JSON"):
        json_value(_reply(text))


def test_scores_have_reasons() -> None:
    text = '{"x": {"score": 4, "reason": " fine "}, "y": {"score": 1, "reason": "blurred"}}'
    assert scores(_reply(text), ("x", "y"), 1, 5) == {"x": (4, "fine"), "y": (1, "blurred")}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "does not have the keys x"),
        ('{"x": {"score": 4, "reason": "a"}, "z": {"score": 4, "reason": "a"}}', "does not have the keys"),
        ('{"x": 4}', "score and a reason"),
        ('{"x": {"score": 4}}', "score and a reason"),
        ('{"x": {"score": 6, "reason": "a"}}', "not an integer from 1 to 5"),
        ('{"x": {"score": 4.0, "reason": "a"}}', "not an integer"),
        ('{"x": {"score": true, "reason": "a"}}', "not an integer"),
        ('{"x": {"score": "4", "reason": "a"}}', "not an integer"),
        ('{"x": {"score": 4, "reason": " "}}', "no reason"),
        ("[1]", "does not have the keys"),
    ],
)
def test_scores_of_another_form_are_a_failed_record(text: str, reason: str) -> None:
    with pytest.raises(SampleError, match=reason):
        scores(_reply(text), ("x",), 1, 5)


def test_a_name_is_the_whole_reply() -> None:
    assert one_of(_reply("`OCR`."), ("ocr", "math")) == "ocr"
    for text in ("ocr or math", "It is ocr", "code"):
        with pytest.raises(SampleError, match="none of ocr, math"):
            one_of(_reply(text), ("ocr", "math"))
