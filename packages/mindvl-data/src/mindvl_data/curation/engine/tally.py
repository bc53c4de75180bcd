# SPDX-License-Identifier: Apache-2.0
"""Counts, histograms and examples of one part, and their sums over parts.

Filled by part_run.py, added up for `curation.json` and the page. Sums do not depend on the order of the parts: counts are
integers, values are rounded to 7 bits before they are counted, and examples are those with the lowest hashes.
"""

import base64
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from PIL import Image

from mindvl_data.config import ImageConfig
from mindvl_data.curation.record import Record
from mindvl_data.curation.step import Drop
from mindvl_data.decoding import opened
from mindvl_data.errors import SampleError

EXAMPLES_PER_REASON = 4
KEPT_EXAMPLES = 16
MAX_CATEGORIES = 100  # different strings of a fact; facts with more are not drawn
THUMBNAIL_SIDE = 192  # pixels
MAX_POINTS = 2000  # of the map of clusters
TEXT_LENGTH = 280  # characters of an example's text

_VALUE_BITS = 7
_MAX_INTEGER = 1 << 1023  # larger ones are not in the range of float64

Tally = dict[str, Any]


def new_tally(num_steps: int) -> Tally:
    """An empty tally for the steps of a pipeline."""
    return {
        "read": 0,
        "written": 0,
        "quarantined": 0,
        "steps": [{"in": 0, "out": 0, "dropped": {}, "quarantined": {}, "facts": {}} for _ in range(num_steps)],
        "facts": {},
        "examples": {},
        "points": [],
    }


def count_values(into: dict[str, Any], name: str, values: Sequence[Any]) -> None:
    """Add the values of a fact to its histogram (numbers) or its categories (strings and booleans)."""
    if not values:
        return
    entry = into.setdefault(name, {"numbers": {}, "categories": {}, "has_more": False})
    numbers = [value for value in values if type(value) is float or (type(value) is int and abs(value) < _MAX_INTEGER)]
    if numbers:
        found, counts = np.unique(_rounded(np.asarray(numbers, np.float64)), return_counts=True)
        _add_counts(entry["numbers"], zip(map(repr, found.tolist()), counts.tolist(), strict=True))
    texts = Counter(str(value) for value in values if isinstance(value, str | bool))
    _add_counts(entry["categories"], texts.items())
    _limit(entry)


def add_tally(total: Tally, part: Tally) -> None:
    """Add the tally of a part to a total."""
    for name in ("read", "written", "quarantined"):
        total[name] += part[name]
    # A part that an earlier configuration has finished may have other numbers of steps after its own.
    for sums, counts in zip(total["steps"], part["steps"], strict=False):
        for name in ("in", "out"):
            sums[name] += counts[name]
        for name in ("dropped", "quarantined"):
            _add_counts(sums[name], counts[name].items())
        _add_facts(sums["facts"], counts["facts"])
    _add_facts(total["facts"], part["facts"])
    for key, examples in part["examples"].items():
        merged = sorted([*total["examples"].get(key, ()), *examples], key=lambda example: example["rank"])
        total["examples"][key] = merged[: _limit_of(key)]
    total["points"] = map_points([*total["points"], *part["points"]])


def _add_counts(into: dict[str, int], counts: Iterable[tuple[str, int]]) -> None:
    for key, count in counts:
        into[key] = into.get(key, 0) + count


def _add_facts(into: dict[str, Any], facts: dict[str, Any]) -> None:
    for name, entry in facts.items():
        sums = into.setdefault(name, {"numbers": {}, "categories": {}, "has_more": False})
        _add_counts(sums["numbers"], entry["numbers"].items())
        _add_counts(sums["categories"], entry["categories"].items())
        sums["has_more"] |= entry["has_more"]
        _limit(sums)


def _limit(entry: dict[str, Any]) -> None:
    if len(entry["categories"]) > MAX_CATEGORIES or entry["has_more"]:
        entry["categories"], entry["has_more"] = {}, True


def _rounded(values: Any) -> Any:
    mantissas, exponents = np.frexp(values[np.isfinite(values)])
    return np.ldexp(np.trunc(np.ldexp(mantissas, _VALUE_BITS)), exponents - _VALUE_BITS) + 0.0


def _limit_of(key: str) -> int:
    return KEPT_EXAMPLES if key == "kept" else EXAMPLES_PER_REASON


class Examples:
    """The records of each key with the lowest hashes: a choice that does not depend on the order.

    Args:
        seed: Seed of the pipeline.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept: dict[str, list[tuple[int, Record, str, Drop | None]]] = {}

    def offer(self, key: str, record: Record, step: str, drop: Drop | None = None) -> None:
        """Consider a record as an example."""
        kept = self._kept.setdefault(key, [])
        rank = example_rank(self._seed, record)
        if len(kept) < _limit_of(key) or rank < kept[-1][0]:
            kept.append((rank, record, step, drop))
            kept.sort(key=lambda entry: entry[0])
            del kept[_limit_of(key) :]

    def chosen(self) -> list[tuple[str, Record, dict[str, Any]]]:
        """(key, record, example without thumbnail) of every example."""
        found = []
        for key, kept in sorted(self._kept.items()):
            for rank, record, step, drop in kept:
                facts = {**record.facts, **(drop.facts if drop else {})}
                example = {"rank": rank, "id": record.id, "step": step, "facts": facts, "text": _excerpt(record)}
                if drop is not None:
                    example |= {"reason": drop.reason, "value": drop.value}
                found.append((key, record, example))
        return found


def example_rank(seed: int, record: Record) -> int:
    """A hash that orders records at random."""
    return int.from_bytes(blake2b(f"{seed}/{record.number}/{record.piece}".encode(), digest_size=6).digest(), "little")


def map_points(points: list[list[Any]]) -> list[list[Any]]:
    """The points that are kept of [rank, x, y, cluster]."""
    return sorted(points)[:MAX_POINTS]


def _excerpt(record: Record) -> str:
    try:
        text = record.text()
    except (TypeError, AttributeError, ValueError):  # a body that is not valid; the writer puts it into quarantine
        return ""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= TEXT_LENGTH else text[: TEXT_LENGTH - 3] + "..."


def thumbnail(record: Record) -> str | None:
    """The first image as a small JPEG in base64; None if there is none or it cannot be decoded."""
    if not record.media:
        return None
    try:
        decode_limit = ImageConfig().decode_limit
        with opened(record.media[0], decode_limit=decode_limit, at_least=(THUMBNAIL_SIDE, THUMBNAIL_SIDE)) as decoded:
            image = Image.fromarray(np.ascontiguousarray(decoded.rows(0, decoded.height)[..., :3]))
        image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    except SampleError:
        return None
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return base64.b64encode(file.getvalue()).decode()
