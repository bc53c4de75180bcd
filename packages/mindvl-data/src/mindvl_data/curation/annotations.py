# SPDX-License-Identifier: Apache-2.0
"""The step `merge_annotations`: annotations of several models become one answer where they agree. B.1.5, B.1.6.

The paper merges the annotations of three models of GUI data and checks their consistency. Annotations are fields of the
record, or lines of one JSONL file per model with the id of the record. Uses agreement.py.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mindvl_data.curation.agreement import Tolerance, majority
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Drop, Outcome, Step
from mindvl_data.errors import DataError


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """Parameters of the step `merge_annotations`.

    Attributes:
        fields: Fields of the record with the annotations of one model each.
        files: Name of a model -> JSONL file of {"id": ID, "answer": ANNOTATION}; ID is the field `id` of the record, or
            its id in this pipeline. The files are kept in memory.
        min_agree: Annotations that must agree; 0: more than half of those that exist.
        min_iou: Smallest overlap of boxes that agree; 0.5 is the usual threshold of detection benchmarks.
        max_distance: Largest distance of points that agree, in pixels.
        on_disagreement: `drop` the record, or `keep` it as it is, with the fact `annotations_agree` false, for a step that
            asks people or another model.
    """

    fields: tuple[str, ...] = ()
    files: dict[str, Path] = field(default_factory=dict)
    min_agree: int = 0
    min_iou: float = 0.5
    max_distance: float = 28.0
    on_disagreement: Literal["drop", "keep"] = "drop"

    def __post_init__(self) -> None:
        if len(self.fields) + len(self.files) < 2:
            raise ValueError(
                "fields: must name, with files, at least two annotations to compare. Add a field or a file."
            )
        if not 0 <= self.min_agree <= len(self.fields) + len(self.files):
            raise ValueError(
                f"min_agree: must be from 0 to the number of annotations, got {self.min_agree}. Correct it."
            )


def _prepare(config: MergeConfig, context: Context) -> None:
    for path in config.files.values():
        _answers(path, context)


@Step(
    config=MergeConfig,
    summary="Merge the annotations of several models where enough of them agree.",
    section="B.1.5, B.1.6",
    gives=("annotations", "annotation_agreement", "annotations_agree"),
    reasons={
        "no_annotation": "No model annotated the record.",
        "one_annotation": "Only one model annotated the record.",
        "disagreement": "Too few annotations agree; the value shows them.",
    },
    prepare=_prepare,
)
def merge_annotations(records: list[Record], config: MergeConfig, context: Context) -> Sequence[Outcome]:
    """B.1.5, B.1.6: replace the answer of a record by what enough models annotate alike.

    An annotation is a text, a number, or an object such as {"action": "click", "point": [x, y]}. Boxes and points that
    agree are replaced by their median. An object with a box or a point is written with box and point parts.
    """
    tolerance = Tolerance(min_iou=config.min_iou, max_distance=config.max_distance)
    return [_merged(record, config, tolerance, context) for record in records]


def _merged(record: Record, config: MergeConfig, tolerance: Tolerance, context: Context) -> Outcome:
    found: dict[str, Any] = {name: record.body[name] for name in config.fields if record.body.get(name) is not None}
    for name, path in config.files.items():
        answers = _answers(path, context)
        key = str(record.body.get("id", record.id))
        if key in answers or record.id in answers:
            found[name] = answers.get(key, answers.get(record.id))
    if not found:
        return Drop("no_annotation", 0)
    members, value = majority(list(found.values()), tolerance)
    share = round(len(members) / len(found), 4)
    needed = config.min_agree or len(found) // 2 + 1
    facts = {
        "annotations": len(found),
        "annotation_agreement": share,
        "annotations_agree": len(members) >= max(needed, 2),
    }
    if len(found) < 2 and config.on_disagreement == "drop":
        return Drop("one_annotation", next(iter(found)), facts)
    if not facts["annotations_agree"]:
        shown = json.dumps(found, ensure_ascii=False, default=str)[:300]
        return Drop("disagreement", shown, facts) if config.on_disagreement == "drop" else record.with_facts(**facts)
    merged = _with_answer(record, value).with_body(**dict.fromkeys(config.fields))
    return merged.with_body(annotated_by=[list(found)[index] for index in members]).with_facts(**facts)


def _answers(path: Path, context: Context) -> dict[str, Any]:
    """id -> annotation of a file."""

    def read() -> dict[str, Any]:
        answers: dict[str, Any] = {}
        number = 0
        try:
            with path.open(encoding="utf-8") as file:
                for line in file:
                    number += 1
                    if line.strip():
                        entry = json.loads(line)
                        answers[str(entry["id"])] = entry["answer"]
        except OSError as error:
            raise DataError(f"steps: merge_annotations: {path} cannot be read ({error}). Correct the path.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}:{number}: is not an object with id and answer ({type(error).__name__}). Correct the line."
            ) from error
        return answers

    return context.resource(("annotations", str(path)), read)


def _with_answer(record: Record, value: Any) -> Record:
    """The record with an annotation as the content of its last assistant message; one is added if there is none."""
    answer = {"role": "assistant", "content": _parts(value)}
    turns = list(record.body.get("messages") or [{"role": "user", "content": record.body.get("content", "")}])
    if turns[-1].get("role") == "assistant":
        turns[-1] = {**turns[-1], **answer}
    else:
        turns.append(answer)
    return record.with_body(messages=turns, content=None)


def _parts(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        parts: list[dict[str, Any]] = []
        for name, one in value.items():
            parts += [_text(("\n" if parts else "") + f"{name}: "), *_parts(one)]
        return _joined(parts)
    if isinstance(value, list) and len(value) in (2, 4) and all(isinstance(one, int | float) for one in value):
        kind, key = ("point", "xy") if len(value) == 2 else ("box", "xyxy")
        return [{"type": kind, "image": 0, key: value}]
    return [_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))]


def _joined(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join text parts that follow each other."""
    joined: list[dict[str, Any]] = []
    for part in parts:
        if joined and part["type"] == joined[-1]["type"] == "text":
            joined[-1] = _text(joined[-1]["text"] + part["text"])
        else:
            joined.append(part)
    return joined


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
