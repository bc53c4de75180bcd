# SPDX-License-Identifier: Apache-2.0
"""Items of Arena-Hard from its own files: questions as JSON lines, and the replies of a baseline model to them.

Comes beside jsonl.py. Version 0.1 writes {"question_id", "cluster", "turns": [{"content"}]}, and replies as {"question_id",
"choices": [{"turns": [{"content"}]}]}; version 2.0 writes {"uid", "category", "prompt"}, and replies as {"uid", "messages"}.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.benchmark import IMAGE_MARK, Item


def is_arena(row: Any) -> bool:
    """Whether a line is a question of Arena-Hard."""
    return isinstance(row, Mapping) and ({"question_id", "turns"} <= row.keys() or {"uid", "prompt"} <= row.keys())


def read_arena(path: Path, baseline: Path | None) -> tuple[Item, ...]:
    """Items of a file of questions, with the replies of the baseline as references.

    Raises:
        EvaluationError: There is no baseline, or every wrong line and question without a reply.
    """
    if baseline is None:
        raise EvaluationError(
            f"{path}: Arena-Hard compares with a baseline model. Give its replies with --baseline FILE."
        )
    problems: list[str] = []
    replies: dict[str, str] = {}
    for where, row in _rows(baseline, problems):
        try:
            replies[_key(row)] = _reply(row)
        except (KeyError, IndexError, TypeError, StopIteration):
            problems.append(
                f"{where}: is not a reply of Arena-Hard (question_id and choices, or uid and messages). Correct it."
            )
    items: dict[str, Item] = {}
    for where, row in _rows(path, problems):
        try:
            key, question = _key(row), row["prompt"] if "prompt" in row else row["turns"][0]["content"]
        except (KeyError, IndexError, TypeError):
            problems.append(
                f"{where}: is not a question of Arena-Hard (question_id and turns, or uid and prompt). Correct it."
            )
            continue
        if key in items:
            problems.append(f"{where}: id {key!r} is used twice. Give every line its own id.")
        if not replies.get(key, "").strip():
            problems.append(f"{where}: {baseline} has no reply to {key!r}. Add it.")
            continue
        items[key] = Item(
            id=key,
            task=path.stem,
            images=(),
            question=str(question).replace(IMAGE_MARK, "<image >"),  # text that would be read as an image
            answer=replies[key],
            metric="arena_hard",
            references=replies[key],
            options={"question": str(question)},
            fields={"category": row["category"]} if row.get("category") else {},
        )
    if problems:
        raise EvaluationError(*problems[:20])
    if not items:
        raise EvaluationError(f"{path}: the benchmark is empty. Copy the file again.")
    return tuple(items.values())


def _rows(path: Path, problems: list[str]) -> Iterator[tuple[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: cannot be read ({error}). Copy the file again.") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except ValueError as error:
                problems.append(f"{path}:{number}: is not valid JSON ({error}). Copy the file again.")


def _key(row: Any) -> str:
    return str(row["uid"] if "uid" in row else row["question_id"])


def _reply(row: Any) -> str:
    if "choices" in row:
        return str(row["choices"][0]["turns"][0]["content"])
    content = next(message["content"] for message in reversed(row["messages"]) if message["role"] == "assistant")
    return str(content["answer"] if isinstance(content, Mapping) else content)
