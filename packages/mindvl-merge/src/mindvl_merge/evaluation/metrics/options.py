# SPDX-License-Identifier: Apache-2.0
"""Read the arguments of a metric: the project it follows, references and choices as files of the field write them.

Comes before every metric.
"""

import ast
import json
import string
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args

from mindvl_merge.errors import EvaluationError

Compat = Literal["vlmevalkit", "lmms-eval", "strict"]


def read_compat(text: str) -> Compat:
    """The rule set of this name; `lmms_eval` is accepted for `lmms-eval`.

    Raises:
        EvaluationError: There is none.
    """
    name = str(text).lower().replace("_", "-")
    if name not in get_args(Compat):
        raise EvaluationError(f"compat: {text!r} is unknown. Use {', '.join(get_args(Compat))}.")
    return cast(Compat, name)


def as_text(value: Any) -> str:
    """Text of a prediction or a reference; None is empty."""
    return "" if value is None else str(value)


def as_words(text: str) -> str:
    """Text with one blank between words and none outside."""
    return " ".join(text.split())


def read_list(value: Any) -> list[Any] | None:
    """A list, tuple or array, or the text of one (`['a', 'b']` or JSON); None for anything else."""
    if isinstance(value, str):
        if not (value.lstrip().startswith("[") and value.rstrip().endswith("]")):
            return None
        for read in (ast.literal_eval, json.loads):  # a literal is data; nothing is evaluated
            try:
                parsed = read(value.strip())
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                continue
            return parsed if isinstance(parsed, list) else None
        return None
    if isinstance(value, list | tuple):
        return list(value)
    if hasattr(value, "tolist"):
        listed = value.tolist()
        return listed if isinstance(listed, list) else None
    return None


def read_references(references: Any, *, has_lists: bool) -> list[str]:
    """References as texts.

    Args:
        references: A text, a number, or a list of these; VQAv2's `{"answer": text}` entries too.
        has_lists: The text of a list is a list, as VLMEvalKit writes several references into one cell.

    Raises:
        EvaluationError: There is none.
    """
    entries = None if isinstance(references, str) and not has_lists else read_list(references)
    if entries is None:
        entries = [] if references is None else [references]
    texts = [as_text(entry["answer"] if isinstance(entry, Mapping) else entry) for entry in entries]
    if not texts:
        raise EvaluationError("references: there is none. Give the expected text or a list of accepted texts.")
    return texts


def read_choices(choices: Any) -> dict[str, str]:
    """Option letter -> text, in order.

    Args:
        choices: A mapping of letters, a list of texts, the text of a list, or None. Options that are None or NaN are
            omitted, as for the empty cells of a table.

    Raises:
        EvaluationError: It is something else, or there are more options than letters.
    """
    if choices is None:
        return {}
    if isinstance(choices, Mapping):
        entries = dict(choices)
    else:
        listed = read_list(choices)
        if listed is None:
            raise EvaluationError(
                f"choices: must be a list of texts or a mapping of letters to texts, got {choices!r}. Correct the item."
            )
        if len(listed) > len(string.ascii_uppercase):
            raise EvaluationError(f"choices: {len(listed)} options, at most 26 are supported. Correct the item.")
        entries = dict(zip(string.ascii_uppercase, listed, strict=False))
    wrong = [key for key in entries if key not in string.ascii_uppercase or len(key) != 1]
    if wrong:
        raise EvaluationError(f"choices: {wrong[0]!r} is not a letter from A to Z. Name options by letters.")
    return {key: str(text) for key, text in entries.items() if not is_missing(text)}


def is_missing(value: Any) -> bool:
    """Whether a cell is None or NaN."""
    return value is None or (isinstance(value, float) and value != value)


def letters(count: int) -> Sequence[str]:
    """The first option letters."""
    return string.ascii_uppercase[:count]
