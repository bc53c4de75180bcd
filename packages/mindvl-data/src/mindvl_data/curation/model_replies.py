# SPDX-License-Identifier: Apache-2.0
"""Read replies of models strictly: what is cut, empty or not of the requested form is a failed record, never a guess.

Used by the steps that ask an endpoint.
"""

import json
import re
from typing import Any

from mindvl_data.curation.endpoint import Reply
from mindvl_data.errors import SampleError

_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)
_REASONING = re.compile(r"<think>.*?</think>", re.DOTALL)


def complete_text(reply: Reply) -> str:
    """The text of a reply, without a block of reasoning at its start.

    Raises:
        SampleError: The reply was cut at the maximum number of tokens, or is empty.
    """
    if reply.finish_reason == "length":
        raise SampleError(
            f"the reply of the model was cut after {reply.completion_tokens} tokens: {_excerpt(reply.text)}"
        )
    text = reply.text.strip()
    reasoning = _REASONING.match(text)
    text = text[reasoning.end() :].strip() if reasoning else text
    if not text:
        raise SampleError("the reply of the model is empty")
    return text


def json_value(reply: Reply) -> Any:
    """The JSON value that is the whole reply; it may stand in one fenced code block.

    Raises:
        SampleError: The reply is anything else, or repeats a key of an object.
    """
    text = complete_text(reply)
    fenced = _FENCE.fullmatch(text)
    try:
        return json.loads(fenced[1] if fenced else text, object_pairs_hook=_unique, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise SampleError(f"the reply of the model is not JSON ({error}): {_excerpt(text)}") from error


def scores(reply: Reply, dimensions: tuple[str, ...], low: int, high: int) -> dict[str, tuple[int, str]]:
    """(score, reason) by dimension, from `{"DIMENSION": {"score": 3, "reason": "..."}, ...}`.

    Raises:
        SampleError: A dimension is missing or unknown, a score is no integer from `low` to `high`, or a reason is missing.
    """
    value = json_value(reply)
    if not isinstance(value, dict) or set(value) != set(dimensions):
        raise SampleError(
            f"the reply of the model does not have the keys {', '.join(dimensions)}: {_excerpt(reply.text)}"
        )
    found = {}
    for name in dimensions:
        entry = value[name]
        if not isinstance(entry, dict) or set(entry) != {"score", "reason"}:
            raise SampleError(f"{name} does not have a score and a reason: {_excerpt(reply.text)}")
        score, reason = entry["score"], entry["reason"]
        if type(score) is not int or not low <= score <= high:
            raise SampleError(f"the score of {name} is {score!r:.50}, not an integer from {low} to {high}")
        if not isinstance(reason, str) or not reason.strip():
            raise SampleError(f"the score of {name} has no reason")
        found[name] = (score, reason.strip())
    return found


def one_of(reply: Reply, names: tuple[str, ...]) -> str:
    """The name that is the whole reply, in any case, with or without quotes and a full stop.

    Raises:
        SampleError: The reply is anything else.
    """
    text = complete_text(reply).strip("\"'`.").strip().lower()
    for name in names:
        if text == name.lower():
            return name
    raise SampleError(f"the reply of the model is none of {', '.join(names)}: {_excerpt(reply.text)}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise SampleError("the reply of the model is not JSON: it repeats a key")
    return value


def _refused(name: str) -> None:
    raise SampleError(f"the reply of the model is not JSON: it contains {name}")


def _excerpt(text: str) -> str:
    return repr(text[:150])
