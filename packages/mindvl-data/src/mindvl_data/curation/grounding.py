# SPDX-License-Identifier: Apache-2.0
"""The step `grounding_tasks`: each region of an image becomes a referring or a grounding task at random. B.1.4.

Referring: a box is given, the phrase is the answer. Grounding: the phrase is given, its boxes or points are the answer.
Coordinates are written as box and point parts in pixels of the original image (docs/reference/data-format.md); training
converts them to the coordinates of the resized image. Uses regions.py.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mindvl_data.curation.documents import is_chinese
from mindvl_data.curation.record import Record
from mindvl_data.curation.regions import Region, inside, point_of, regions_of
from mindvl_data.curation.step import Context, Drop, Outcome, Step

# {} is the place of the box or of the phrase.
REFER = ("What is in the box {}?", "Describe the region {}.", "Give a short caption of the area {}.")
REFER_ZH = (
    "\u6846 {} \u4e2d\u662f\u4ec0\u4e48\uff1f",
    "\u63cf\u8ff0\u533a\u57df {}\u3002",
    "\u7528\u4e00\u53e5\u8bdd\u8bf4\u660e {} \u5185\u7684\u5185\u5bb9\u3002",
)
GROUND = ("Find the box of: {}", "Where is {}? Answer with a box.", "Locate {} in the image.")
GROUND_ZH = (
    "\u627e\u51fa{}\u7684\u4f4d\u7f6e\u6846\u3002",
    "{}\u5728\u54ea\u91cc\uff1f\u7528\u6846\u56de\u7b54\u3002",
    "\u5728\u56fe\u4e2d\u5b9a\u4f4d{}\u3002",
)
POINT = ("Point to {}.", "Where is {}? Answer with a point.", "Give a point on {}.")
POINT_ZH = (
    "\u6307\u51fa{}\u3002",
    "{}\u5728\u54ea\u91cc\uff1f\u7528\u70b9\u56de\u7b54\u3002",
    "\u7ed9\u51fa{}\u4e0a\u7684\u4e00\u4e2a\u70b9\u3002",
)


@dataclass(frozen=True, kw_only=True)
class GroundingConfig:
    """Parameters of the step `grounding_tasks`.

    Attributes:
        referring_share: Probability that a region becomes a referring task.
        point_share: Probability that a grounding task asks for points; they are those of masks, or centers of boxes.
        max_regions: Regions of one image, chosen by the seed; each one is a turn of the conversation.
        min_side: Regions with a smaller side are ignored, in pixels.
        max_same: A phrase with more boxes is not used for grounding, because it does not say which one is meant.
        language: Language of the questions; `auto` is that of the phrase.
    """

    referring_share: float = 0.5
    point_share: float = 0.2
    max_regions: int = 16
    min_side: float = 4.0
    max_same: int = 8
    language: Literal["auto", "en", "zh"] = "auto"

    def __post_init__(self) -> None:
        for name in ("referring_share", "point_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: must be from 0 to 1, got {getattr(self, name)}. Use a probability.")
        if self.max_regions < 1:
            raise ValueError(f"max_regions: must be at least 1, got {self.max_regions}. Use 16.")


@Step(
    config=GroundingConfig,
    summary="Turn regions into referring tasks (box to phrase) and grounding tasks (phrase to box or point) at random.",
    section="B.1.4",
    needs=("image",),
    gives=("regions", "usable_regions", "referring", "grounding"),
    reasons={
        "no_regions": "No region with a phrase is inside of the image and large enough.",
        "ambiguous": "Every phrase has more than max_same boxes.",
    },
)
def grounding_tasks(records: list[Record], config: GroundingConfig, context: Context) -> Sequence[Outcome]:
    """B.1.4: turn the regions of an image into one conversation of referring and grounding tasks."""
    return [_conversation(record, config, context) for record in records]


def _conversation(record: Record, config: GroundingConfig, context: Context) -> Outcome:
    height, width = record.image().shape[:2]
    known = regions_of(record.body, width, height)
    usable = [one for one in (inside(region, width, height, config.min_side) for region in known) if one is not None]
    facts = {"regions": len(known), "usable_regions": len(usable)}
    if not usable:
        return Drop("no_regions", len(known), facts)
    same: dict[str, list[Region]] = {}
    for region in usable:
        same.setdefault(region.phrase.casefold(), []).append(region)
    chance = context.random(record, "grounding_tasks")
    chosen = sorted(chance.sample(range(len(usable)), min(config.max_regions, len(usable))))
    messages: list[dict[str, Any]] = []
    asked: set[str] = set()
    counts = {"referring": 0, "grounding": 0}
    for region in (usable[index] for index in chosen):
        group = same[region.phrase.casefold()]
        refer = chance.random() < config.referring_share
        if not refer and (region.phrase.casefold() in asked or len(group) > config.max_same):
            continue
        asked |= set() if refer else {region.phrase.casefold()}
        counts["referring" if refer else "grounding"] += 1
        question, answer = _referring(region, config, chance) if refer else _grounding(region, group, config, chance)
        image = [] if messages else [{"type": "image"}]
        messages += [{"role": "user", "content": [*image, *question]}, {"role": "assistant", "content": answer}]
    if not messages:
        return Drop("ambiguous", len(usable), facts)
    removed = dict.fromkeys(
        ("regions", "annotations", "categories", "noun_chunks", "ref_exps", "bboxes", "labels", "content")
    )
    return record.with_body(**removed, messages=messages).with_facts(**facts, **counts)


def _referring(
    region: Region, config: GroundingConfig, chance: random.Random
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    template = chance.choice(REFER_ZH if _in_chinese(region.phrase, config) else REFER)
    return _filled(template, _box_part(region)), [_text(region.phrase)]


def _grounding(
    region: Region, group: Sequence[Region], config: GroundingConfig, chance: random.Random
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A phrase with several boxes is answered with all of them, from left to right."""
    points = chance.random() < config.point_share
    english, chinese = (POINT, POINT_ZH) if points else (GROUND, GROUND_ZH)
    template = chance.choice(chinese if _in_chinese(region.phrase, config) else english)
    answer: list[dict[str, Any]] = []
    for one in sorted(group, key=lambda one: one.xyxy):
        answer += [_text("\n")] if answer else []
        answer.append(_point_part(one) if points else _box_part(one))
    return [_text(template.replace("{}", region.phrase))], answer


def _in_chinese(phrase: str, config: GroundingConfig) -> bool:
    return config.language == "zh" or (config.language == "auto" and is_chinese(phrase))


def _filled(template: str, part: dict[str, Any]) -> list[dict[str, Any]]:
    before, after = template.split("{}")
    return [*([_text(before)] if before else []), part, *([_text(after)] if after else [])]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _box_part(region: Region) -> dict[str, Any]:
    return {"type": "box", "image": 0, "xyxy": [round(value, 2) for value in region.xyxy]}


def _point_part(region: Region) -> dict[str, Any]:
    return {"type": "point", "image": 0, "xy": [round(value, 2) for value in point_of(region)]}
