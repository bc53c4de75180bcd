# SPDX-License-Identifier: Apache-2.0
"""Referring and grounding tasks from regions."""

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mindvl_data.curation.grounding import GROUND, POINT, REFER, REFER_ZH, GroundingConfig, grounding_tasks
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Drop

buffer = io.BytesIO()
Image.new("RGB", (100, 50)).save(buffer, "PNG")
REGIONS = [{"phrase": f"thing {index}", "xyxy": [index, 0, index + 20, 30]} for index in range(40)]


def run(regions: list[dict[str, Any]], seed: int = 1, **config: Any) -> Any:
    record = Record(number=9, id="a", body={"regions": regions}, media=(buffer.getvalue(),))
    (outcome,) = grounding_tasks([record], GroundingConfig(**config), Context(seed=seed, cache=Path("unused")))
    return outcome


def test_a_referring_task_shows_the_box_and_answers_with_the_phrase() -> None:
    record = run(REGIONS[:1], referring_share=1)
    question, answer = record.body["messages"]
    image, *parts = question["content"]
    assert image == {"type": "image"}
    (box,) = [part for part in parts if part["type"] == "box"]
    assert box == {"type": "box", "image": 0, "xyxy": [0, 0, 20, 30]}
    assert "".join(part.get("text", "{}") for part in parts) in REFER
    assert answer["content"] == [{"type": "text", "text": "thing 0"}]
    assert record.facts == {"regions": 1, "usable_regions": 1, "referring": 1, "grounding": 0}
    assert "regions" not in record.body


def test_a_grounding_task_answers_with_all_boxes_of_the_phrase() -> None:
    twice = [{"phrase": "dog", "xyxy": [40, 0, 60, 30]}, {"phrase": "Dog", "xyxy": [0, 0, 20, 30]}]
    record = run(twice, referring_share=0, point_share=0)
    question, answer = record.body["messages"]  # one question, although there are two regions
    assert question["content"][1]["text"] in [text.replace("{}", name) for text in GROUND for name in ("dog", "Dog")]
    assert [part.get("xyxy", part.get("text")) for part in answer["content"]] == [[0, 0, 20, 30], "\n", [40, 0, 60, 30]]


def test_points_are_answered_where_they_are_asked_for() -> None:
    record = run([{"phrase": "dog", "xyxy": [0, 0, 20, 30], "xy": [3, 4]}], referring_share=0, point_share=1)
    question, answer = record.body["messages"]
    assert question["content"][1]["text"] in [text.replace("{}", "dog") for text in POINT]
    assert answer["content"] == [{"type": "point", "image": 0, "xy": [3, 4]}]


def test_half_of_the_regions_become_each_task_and_the_choice_depends_on_the_seed() -> None:
    record = run(REGIONS, max_regions=40)
    assert record.facts["referring"] + record.facts["grounding"] == 40
    assert 10 <= record.facts["referring"] <= 30
    assert run(REGIONS).body == run(REGIONS).body
    assert run(REGIONS).body != run(REGIONS, seed=2).body
    assert len(run(REGIONS).body["messages"]) <= 2 * 16


def test_chinese_phrases_are_asked_about_in_chinese() -> None:
    record = run([{"phrase": "\u4e00\u53ea\u72d7", "xyxy": [0, 0, 20, 30]}], referring_share=1)
    asked = "".join(part.get("text", "{}") for part in record.body["messages"][0]["content"][1:])
    assert asked in REFER_ZH


def test_images_without_a_usable_region_are_dropped() -> None:
    assert run([{"phrase": "x", "xyxy": [200, 0, 220, 30]}]).reason == "no_regions"
    crowd = [{"phrase": "bird", "xyxy": [index, 0, index + 9, 30]} for index in range(9)]
    dropped = run(crowd, referring_share=0)
    assert isinstance(dropped, Drop)
    assert dropped.reason == "ambiguous"


def test_probabilities_outside_of_their_range_are_refused() -> None:
    with pytest.raises(ValueError, match="point_share: must be from 0 to 1"):
        GroundingConfig(point_share=2)
