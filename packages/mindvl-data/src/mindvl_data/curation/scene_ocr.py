# SPDX-License-Identifier: Apache-2.0
"""The step `scene_ocr`: what two OCR engines read alike in an image becomes its text. B.1.2.

The paper intersects the results of two models. Here lines of both engines whose boxes overlap form groups; a group is kept
if the engines read the same in it, except for spaces, case and the width of characters. Engines are in ocr_engines.py.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mindvl_data.curation.document_rules import clean_text
from mindvl_data.curation.documents import is_chinese
from mindvl_data.curation.ocr_engines import (
    EngineConfig,
    OcrLine,
    RapidOcrConfig,
    TesseractConfig,
    check_engine,
    engine_of,
)
from mindvl_data.curation.page_layout import Line, reading_order
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Context, Drop, Outcome, Step

PROMPTS = ("Read the text in this image.", "What text is in the image?", "Transcribe all text that you can see.")
PROMPTS_ZH = (
    "\u8bfb\u51fa\u56fe\u4e2d\u7684\u6587\u5b57\u3002",
    "\u56fe\u7247\u4e2d\u6709\u54ea\u4e9b\u6587\u5b57\uff1f",
    "\u8f6c\u5199\u56fe\u4e2d\u53ef\u89c1\u7684\u6240\u6709\u6587\u5b57\u3002",
)
BOX_PROMPTS = ("Read each line of text in this image with its box.", "Find all lines of text and their positions.")
BOX_PROMPTS_ZH = (
    "\u8bfb\u51fa\u56fe\u4e2d\u6bcf\u884c\u6587\u5b57\u53ca\u5176\u4f4d\u7f6e\u3002",
    "\u627e\u51fa\u6240\u6709\u6587\u5b57\u884c\u53ca\u5176\u5750\u6807\u3002",
)
_SAME_LINE = 0.5  # vertical overlap of two lines, in heights of the lower one
_SAME_PLACE = 0.3  # overlap of areas, in areas of the smaller box


@dataclass(frozen=True, kw_only=True)
class SceneOcrConfig:
    """Parameters of the step `scene_ocr`.

    Attributes:
        first, second: The two engines; boxes and text are those of the first, spaces between words those of either.
        min_similarity: Smallest similarity of the two readings of a group of lines: 1 minus edit distance per character,
            without spaces, case and width. Below 1, mistakes of the first engine are kept.
        min_agreement: Records with a smaller share of characters that were read alike are dropped.
        form: The answer: `text`, lines in reading order; `lines`, each line after its box; `mixed`, either, by the seed.
        keep_answer: Keep the existing answer of a record that has one, and only measure the agreement of the engines.
    """

    first: EngineConfig = field(default_factory=RapidOcrConfig)
    second: EngineConfig = field(default_factory=TesseractConfig)
    min_similarity: float = 1.0
    min_agreement: float = 0.5
    form: Literal["text", "lines", "mixed"] = "text"
    keep_answer: bool = False

    def __post_init__(self) -> None:
        for name in ("min_similarity", "min_agreement"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: must be from 0 to 1, got {getattr(self, name)}. Use a share such as 0.9.")
        if self.first == self.second:
            raise ValueError("second: is the same engine as first and always agrees with it. Choose another engine.")


def _prepare(config: SceneOcrConfig, context: Context) -> None:
    check_engine(config.first)
    check_engine(config.second)


@Step(
    config=SceneOcrConfig,
    summary="Read images with two OCR engines and keep the lines that both read alike.",
    section="B.1.2",
    needs=("image",),
    gives=("ocr_agreement", "ocr_lines"),
    reasons={
        "no_text": "Neither engine finds text.",
        "disagreement": "The engines read less than min_agreement of the characters alike.",
    },
    extra="ocr",
    prepare=_prepare,
)
def scene_ocr(records: list[Record], config: SceneOcrConfig, context: Context) -> Sequence[Outcome]:
    """B.1.2: read an image with two engines and keep what both read alike, as text or as lines with boxes."""
    first, second = engine_of(config.first, context), engine_of(config.second, context)
    outcomes: list[Outcome] = []
    for record in records:
        if config.keep_answer and any(answer.strip() for answer in record.answers()):
            outcomes.append(record)
            continue
        one, two = first.read(record.image()), second.read(record.image())
        agreed = intersect(one, two, config.min_similarity)
        total = max(sum(len(comparable(line.text)) for line in lines) for lines in (one, two))
        agreement = round(sum(len(comparable(line.text)) for line in agreed) / total, 4) if total else 0.0
        facts = {"ocr_agreement": agreement, "ocr_lines": len(agreed)}
        if not total:
            outcomes.append(Drop("no_text", 0, facts))
        elif not agreed or agreement < config.min_agreement:
            outcomes.append(Drop("disagreement", agreement, facts))
        else:
            outcomes.append(_answered(record, agreed, config, context).with_facts(**facts))
    return outcomes


def intersect(first: Sequence[OcrLine], second: Sequence[OcrLine], min_similarity: float) -> list[OcrLine]:
    """Lines of the first engine that the second one reads alike, in reading order, with the spaces of either.

    Lines are grouped by overlap, because engines divide the same text into lines differently.
    """
    agreed: list[OcrLine] = []
    for one, two in _groups(first, second):
        read, other = "".join(line.text for line in one), "".join(line.text for line in two)
        if similarity(comparable(read), comparable(other)) >= min_similarity:
            agreed += _with_spaces(one, two)
    return _ordered(agreed)


def comparable(text: str) -> str:
    """Text without spaces, case and differences of width, for the comparison of engines."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def similarity(first: str, second: str) -> float:
    """1 minus the edit distance of two texts, in lengths of the longer one; 1 for two empty texts."""
    longer = max(len(first), len(second))
    if not longer:
        return 1.0
    previous = list(range(len(second) + 1))
    for row, left in enumerate(first, start=1):
        current = [row]
        for column, right in enumerate(second, start=1):
            current.append(min(previous[column] + 1, current[-1] + 1, previous[column - 1] + (left != right)))
        previous = current
    return 1 - previous[-1] / longer


def _groups(first: Sequence[OcrLine], second: Sequence[OcrLine]) -> list[tuple[list[OcrLine], list[OcrLine]]]:
    """Connected lines of both engines, each side from left to right; lines that only one engine found are left out."""
    lines = [*first, *second]
    group = list(range(len(lines)))

    def root(index: int) -> int:
        while group[index] != index:
            group[index] = group[group[index]]
            index = group[index]
        return index

    for left in range(len(first)):
        for right in range(len(first), len(lines)):
            if _overlap(lines[left], lines[right]):
                group[root(right)] = root(left)
    found: dict[int, tuple[list[OcrLine], list[OcrLine]]] = {}
    for index, line in enumerate(lines):
        found.setdefault(root(index), ([], []))[index >= len(first)].append(line)
    ordered = [tuple(sorted(side, key=lambda line: line.xyxy) for side in sides) for sides in found.values()]
    return [(one, two) for one, two in ordered if one and two]


def _overlap(first: OcrLine, second: OcrLine) -> bool:
    a, b = first.xyxy, second.xyxy
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= _SAME_LINE * min(a[3] - a[1], b[3] - b[1]):
        return False
    return width * height > _SAME_PLACE * min((a[2] - a[0]) * (a[3] - a[1]), (b[2] - b[0]) * (b[3] - b[1]))


def _with_spaces(one: Sequence[OcrLine], two: Sequence[OcrLine]) -> list[OcrLine]:
    """The first engine's lines; if the second one has a line with more spaces for the same characters, its text."""
    if len(one) == len(two):
        return [
            OcrLine(b.text, a.xyxy, a.score)
            if "".join(a.text.split()) == "".join(b.text.split()) and len(b.text.split()) > len(a.text.split())
            else a
            for a, b in zip(one, two, strict=True)
        ]
    joined = " ".join(line.text for line in two)
    if len(one) == 1 and "".join(one[0].text.split()) == "".join(joined.split()):
        return [OcrLine(joined, one[0].xyxy, one[0].score)]
    return list(one)


def _ordered(lines: Sequence[OcrLine]) -> list[OcrLine]:
    places = [Line(str(index), *line.xyxy, line.xyxy[3] - line.xyxy[1]) for index, line in enumerate(lines)]
    return [lines[int(place.text)] for place in reading_order(places, tables=False) if isinstance(place, Line)]


def _answered(record: Record, lines: Sequence[OcrLine], config: SceneOcrConfig, context: Context) -> Record:
    cleaned = [(clean_text(line.text), [round(value) for value in line.xyxy]) for line in lines]
    chance = context.random(record, "scene_ocr")
    with_boxes = config.form == "lines" or (config.form == "mixed" and chance.random() < 0.5)
    chinese = is_chinese("".join(text for text, _ in cleaned))
    prompts = ((PROMPTS, PROMPTS_ZH), (BOX_PROMPTS, BOX_PROMPTS_ZH))[with_boxes][chinese]
    answer: list[dict[str, Any]] = []
    for number, (text, box) in enumerate(cleaned):
        separator = "\n" if number else ""
        if with_boxes:
            answer += [{"type": "text", "text": separator}] if separator else []
            answer += [{"type": "box", "image": 0, "xyxy": box}, {"type": "text", "text": " " + text}]
        else:
            answer += [{"type": "text", "text": separator + text}]
    if not with_boxes:
        answer = [{"type": "text", "text": "".join(part["text"] for part in answer)}]
    question = [{"type": "image"}, {"type": "text", "text": chance.choice(prompts)}]
    found = [
        {"text": text, "xyxy": box, "score": round(line.score, 4)}
        for (text, box), line in zip(cleaned, lines, strict=True)
    ]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return record.with_body(messages=messages, content=None, ocr_lines=found)
