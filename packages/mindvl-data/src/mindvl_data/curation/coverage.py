# SPDX-License-Identifier: Apache-2.0
"""Steps `text_coverage` and `render_rare`: find characters and words that few records contain, and render more of them. B.1.2.

`text_coverage` counts over all records and notes what is rare at the first record that contains it; `render_rare`, anywhere
after it, adds images of the noted characters and words. The coverage is also written to coverage.json in the cache directory.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mindvl_data.curation.fonts import font_files, usable_fonts
from mindvl_data.curation.page_layout import is_wide
from mindvl_data.curation.record import Record
from mindvl_data.curation.rendering import RenderConfig, rendered_record
from mindvl_data.curation.step import Context, Decision, Outcome, Signatures, Step, register
from mindvl_data.errors import DataError

WIDTH = 32  # bytes of a signature: b"c" or b"w", then the character or word in UTF-8; longer words are not counted
_WORD = re.compile(r"[^\W\d_]{2,}")


@dataclass(frozen=True, kw_only=True)
class TextCoverageConfig:
    """Parameters of the step `text_coverage`.

    Attributes:
        min_character_count: Characters in fewer records than this are rare.
        min_word_count: Words (lower case, at least two letters) in fewer records than this are rare; with 0 no word is rare.
        expected: File with characters and words that the data must contain, separated by spaces or line ends.
        max_items: Maximum number of rare characters and words. The most frequent of them are listed, because words that occur
            once in large data are mostly errors.
    """

    min_character_count: int = 10
    min_word_count: int = 0
    expected: Path | None = None
    max_items: int = 20_000

    def __post_init__(self) -> None:
        for name in ("min_character_count", "min_word_count", "max_items"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must not be negative, got {getattr(self, name)}. Use 0 to turn it off.")


@dataclass(frozen=True, kw_only=True)
class RenderRareConfig(RenderConfig):
    """Parameters of the step `render_rare`, besides those of rendered text.

    Attributes:
        items_per_image: Rare characters and words in one image.
    """

    items_per_image: int = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.items_per_image < 1:
            raise ValueError(f"items_per_image: must be at least 1, got {self.items_per_image}. Use 12.")


def sign_coverage(records: list[Record], config: TextCoverageConfig, context: Context) -> Sequence[NDArray[np.uint8]]:
    """One signature for each different character and word of the answers of a record."""
    return [_signatures(items_of("\n".join(record.answers()))) for record in records]


def items_of(text: str) -> set[bytes]:
    """The different characters (c) and words (w) of a text, as signatures without padding."""
    items = {b"c" + one.encode("utf-8", "replace") for one in set(text) if not one.isspace() and one.isprintable()}
    for word in _WORD.findall(text):
        encoded = b"w" + word.lower().encode("utf-8", "replace")
        if len(encoded) <= WIDTH and not is_wide(word[0]):
            items.add(encoded)
    return items


def decide_coverage(
    signatures: Signatures, config: TextCoverageConfig, context: Context, directory: Path
) -> Iterable[Decision]:
    """Note each rare item, with the number of records that are missing, at the first record that contains it."""
    counts: Counter[bytes] = Counter()
    first: tuple[int, int] | None = None
    for numbers, pieces, block in signatures.blocks():
        if len(numbers) and (first is None or (int(numbers[0]), int(pieces[0])) < first):
            first = int(numbers[0]), int(pieces[0])
        values, occurrences = np.unique(np.ascontiguousarray(block).view(f"S{WIDTH}").reshape(-1), return_counts=True)
        counts.update(dict(zip(values.tolist(), occurrences.tolist(), strict=True)))
    expected = _expected(config.expected)
    rare = _rare(counts, expected, config)
    _write_summary(context.cache / "coverage.json", counts, expected, rare, config)
    noted: dict[tuple[int, int], list[bytes]] = {}
    waiting = set(rare)
    for numbers, pieces, block in signatures.blocks():
        values = np.ascontiguousarray(block).view(f"S{WIDTH}").reshape(-1)
        for row in np.flatnonzero(np.isin(values, np.array(sorted(waiting), dtype=f"S{WIDTH}"))):
            item = bytes(values[row])
            if item in waiting:
                waiting.remove(item)
                noted.setdefault((int(numbers[row]), int(pieces[row])), []).append(item)
    if waiting and first is not None:  # expected items that no record contains
        noted.setdefault(first, []).extend(sorted(waiting))
    for (number, piece), items in sorted(noted.items()):
        names = sorted(items)
        facts = {"rare_items": [item[1:].decode() for item in names], "rare_missing": [rare[item] for item in names]}
        yield Decision(number, piece, facts=facts)


@Step(
    config=RenderRareConfig,
    summary="Add images of rare characters and words, rendered from fonts.",
    section="B.1.2",
    needs=("rare_items", "rare_missing"),
    gives=("rendered_rare", "rare_without_glyph"),
    prepare=lambda config, context: font_files(config.fonts),
)
def render_rare(records: list[Record], config: RenderRareConfig, context: Context) -> Sequence[Outcome]:
    """B.1.2: after each record with noted rare items, add images of them, as many as are missing to the least count.

    Items that no font can show are listed in the fact `rare_without_glyph`.
    """
    fonts = font_files(config.fonts)
    return [_supplemented(record, fonts, config, context) for record in records]


def _signatures(items: set[bytes]) -> NDArray[np.uint8]:
    rows = np.zeros((len(items), WIDTH), np.uint8)
    for row, item in zip(rows, sorted(items), strict=True):
        row[: len(item)] = np.frombuffer(item, np.uint8)
    return rows


def _expected(path: Path | None) -> set[bytes]:
    if path is None:
        return set()
    try:
        items = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"steps: text_coverage: expected: {path} cannot be read ({error}). Correct the path."
        ) from error
    return {(b"c" + item.encode()) if len(item) == 1 else (b"w" + item.lower().encode())[:WIDTH] for item in items}


def _rare(counts: Counter[bytes], expected: set[bytes], config: TextCoverageConfig) -> dict[bytes, int]:
    """Rare item -> number of records that are missing."""
    least = {b"c": config.min_character_count, b"w": config.min_word_count}
    missing = {item: least[item[:1]] - count for item, count in counts.items() if count < least[item[:1]]}
    for item in expected:
        if not counts[item]:
            missing[item] = max(least[item[:1]], 1)
    # Characters first: there are few of them, and each occurs in many words.
    order = sorted(missing, key=lambda item: (item not in expected, item[:1], -counts[item], item))
    return {item: missing[item] for item in order[: config.max_items]}


def _write_summary(
    path: Path, counts: Counter[bytes], expected: set[bytes], rare: dict[bytes, int], config: TextCoverageConfig
) -> None:
    covered = sum(counts[item] > 0 for item in expected)
    summary = {
        "characters": sum(item[:1] == b"c" for item in counts),
        "words": sum(item[:1] == b"w" for item in counts),
        "rare_characters": sum(
            count < config.min_character_count for item, count in counts.items() if item[:1] == b"c"
        ),
        "rare_words": sum(count < config.min_word_count for item, count in counts.items() if item[:1] == b"w"),
        "noted": len(rare),
        "expected": len(expected),
        "expected_covered": round(covered / len(expected), 4) if expected else None,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def _supplemented(record: Record, fonts: Sequence[str], config: RenderRareConfig, context: Context) -> Outcome:
    items, needed = record.facts.get("rare_items"), record.facts.get("rare_missing")
    if not items or not needed:
        return record
    by_fonts: dict[tuple[str, ...], dict[str, int]] = {}  # items that the same fonts can show
    for item, count in zip(items, needed, strict=True):
        by_fonts.setdefault(tuple(usable_fonts(item, fonts, context)[0]), {})[item] = count
    unknown = list(by_fonts.pop((), {}))
    made = [record.with_facts(rare_without_glyph=unknown) if unknown else record]
    for usable, counts in by_fonts.items():
        for group in _groups(counts, config.items_per_image):
            name = f"rare {len(made)}"
            chance = context.random(record, name)
            chance.shuffle(group)
            text = ("" if all(is_wide(item[0]) for item in group) else " ").join(group)
            made.append(rendered_record(record, text, chance.choice(usable), config, context, name))
            made[-1] = made[-1].with_facts(rendered_rare=True)
    return made


def _groups(left: dict[str, int], per_image: int) -> Iterator[list[str]]:
    """Groups of different items, so that each item is in as many groups as are missing."""
    while left:
        group = sorted(left, key=lambda item: (-left[item], item))[:per_image]
        left = {item: count - (item in group) for item, count in left.items() if count > (item in group)}
        yield group


register(
    Step(
        name="text_coverage",
        config=TextCoverageConfig,
        summary="Count the records in which each character and word occurs, and list the rare ones.",
        section="B.1.2",
        needs=("text",),
        gives=("rare_items", "rare_missing"),
        sign=sign_coverage,
        decide=decide_coverage,
        prepare=lambda config, context: _expected(config.expected),
    )
)
