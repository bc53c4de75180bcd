# SPDX-License-Identifier: Apache-2.0
"""Merging the annotations of several models."""

from pathlib import Path
from typing import Any

import pytest

from mindvl_data.curation.annotations import MergeConfig, merge_annotations
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Drop
from mindvl_data.errors import DataError

CONTEXT = Context(seed=0, cache=Path("unused"))
QUESTION = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]


def run(config: MergeConfig, **body: Any) -> Any:
    (outcome,) = merge_annotations([Record(number=0, id="s:1", body={"messages": QUESTION, **body})], config, CONTEXT)
    return outcome


def test_the_answer_of_the_majority_replaces_the_fields() -> None:
    kept = run(MergeConfig(fields=("x", "y", "z")), x="3", y="4", z="3.0")
    assert kept.answers() == ["3"]
    assert kept.body == {"messages": [*QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "3"}]}],
                         "annotated_by": ["x", "z"]}  # fmt: skip
    assert kept.facts == {"annotations": 3, "annotation_agreement": 0.6667, "annotations_agree": True}


def test_disagreement_drops_the_record_with_the_annotations_or_keeps_it_for_people() -> None:
    config = MergeConfig(fields=("x", "y", "z"), min_agree=3)
    dropped = run(config, x="3", y="4", z="3")
    assert dropped == Drop(
        "disagreement",
        '{"x": "3", "y": "4", "z": "3"}',
        {"annotations": 3, "annotation_agreement": 0.6667, "annotations_agree": False},
    )
    kept = run(MergeConfig(fields=("x", "y"), on_disagreement="keep"), x="3", y="4")
    assert kept.body == {"messages": QUESTION, "x": "3", "y": "4"}
    assert kept.facts["annotations_agree"] is False


def test_records_with_fewer_than_two_annotations_are_dropped() -> None:
    config = MergeConfig(fields=("x", "y"))
    assert run(config).reason == "no_annotation"
    assert run(config, x="3").reason == "one_annotation"


def test_boxes_and_points_are_written_as_parts() -> None:
    action = {"action": "click", "point": [10, 20]}
    kept = run(MergeConfig(fields=("x", "y")), x=action, y={"action": "CLICK", "point": [14, 20]})
    assert kept.body["messages"][-1]["content"] == [
        {"type": "text", "text": "action: click\npoint: "},
        {"type": "point", "image": 0, "xy": [12, 20]},
    ]


def test_files_of_annotations_are_joined_by_id(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text('{"id": "s:1", "answer": "yes"}\n{"id": "other", "answer": "no"}\n')
    two.write_text('{"id": 7, "answer": "Yes"}\n')
    config = MergeConfig(files={"one": one, "two": two})
    assert run(config, id=7).answers() == ["yes"]  # the first file by the id of the pipeline, the second by the own one
    two.write_text("{}\n")
    with pytest.raises(DataError, match=r"two.jsonl:1: is not an object with id and answer"):
        merge_annotations([Record(number=0, id="s:1", body={})], config, Context(seed=0, cache=tmp_path))


def test_one_annotation_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="at least two annotations"):
        MergeConfig(fields=("x",))
    with pytest.raises(ValueError, match="min_agree"):
        MergeConfig(fields=("x", "y"), min_agree=3)
