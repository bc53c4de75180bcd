# SPDX-License-Identifier: Apache-2.0
"""The page of `mindvl data curate`: funnel, histograms before and after, examples with reasons, groups of duplicates, clusters.

Comes after mindvl_data.curation, whose tally has all figures and thumbnails. Bars and histograms are SVG and CSS in the
template, so that the page needs no plotting library.
"""

import bisect
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mindvl_cli.pages.render import render
from mindvl_cli.whole_file import write_whole

HIDDEN_FACTS = ("duplicate_group", "cluster_x", "cluster_y", "cluster_exemplar")  # shown in other ways
NUM_TONES = 10  # of style.css
MAP_SIZE = 1000.0
NUM_BINS = 28
MAX_CATEGORIES = 12
MAX_FACTS = 6  # of an example
_LOG_RATIO = 200.0  # of the 99th and the first percentile, from which bins grow


def write_curation_page(path: Path, tally: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Write the page.

    Args:
        tally: Sums of all parts, see mindvl_data.curation.engine.tally.
        manifest: Content of curation.json.
    """
    examples = {key: [_example(one) for one in found] for key, found in tally["examples"].items()}
    page = render(
        "curation",
        title=f"Curation of {manifest['name']}",
        counts=tally,
        manifest=manifest,
        funnel=_funnel(tally, manifest),
        reads=[
            (one["path"], one["format"], f"{one['files']:,}", f"{one['num_bytes']:,}") for one in manifest["inputs"]
        ],
        histograms=list(_histograms(tally, manifest)),
        dropped=list(_dropped(manifest, examples)),
        kept=examples.get("kept", []),
        points=_map(tally["points"]),
        groups=[found for key, found in sorted(examples.items()) if key.startswith("group ") and len(found) > 1],
        quarantined=[
            (step["step"], reason, f"{count:,}")
            for step in manifest["steps"]
            for reason, count in sorted(step["quarantined"].items(), key=lambda pair: -pair[1])[:10]
        ],
    )
    write_whole(path, page.encode("utf-8", "replace"))  # names of files may hold bytes that are not UTF-8


def _funnel(tally: dict[str, Any], manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for the input, for each step and for the output; widths are shares of the greatest count."""
    most = max([tally["read"], *(step["out"] for step in manifest["steps"]), 1])
    rows: list[dict[str, Any]] = [{"name": "read", "count": tally["read"], "lost": ""}]
    for step in manifest["steps"]:
        lost = [f"{count:,} {reason.replace('_', ' ')}" for reason, count in _largest(step["dropped"])]
        failed = sum(step["quarantined"].values())
        rows.append(
            {
                "name": step["step"],
                "count": step["out"],
                "lost": ", ".join([*lost, *([f"{failed:,} quarantined"] if failed else [])]),
            }
        )
    rows.append({"name": "written", "count": tally["written"], "lost": ""})
    return [{**row, "width": round(100 * row["count"] / most, 2)} for row in rows]


def _largest(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))


def _dropped(manifest: dict[str, Any], examples: dict[str, Any]) -> Iterable[dict[str, Any]]:
    for index, step in enumerate(manifest["steps"]):
        for reason, count in _largest(step["dropped"]):
            found = examples.get(f"{index} {reason}", [])
            yield {"step": step["step"], "reason": reason, "count": count, "examples": found}


def _example(example: dict[str, Any]) -> dict[str, Any]:
    facts = [(name, _shown(value)) for name, value in example["facts"].items() if not isinstance(value, list | dict)]
    value = None if example.get("value") is None else _shown(example["value"])
    return {**example, "facts": facts[-MAX_FACTS:], "value": value, "reason": example.get("reason")}


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _histograms(tally: dict[str, Any], manifest: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Each fact as its step measured it, and as it is in the output."""
    for step, counts in zip(manifest["steps"], tally["steps"], strict=True):
        for name, before in counts["facts"].items():
            if name in HIDDEN_FACTS:
                continue
            after = tally["facts"].get(name, {"numbers": {}, "categories": {}})
            title = {"fact": name, "step": step["step"], "bars": None, "categories": None}
            if before["numbers"]:
                yield {**title, **_binned(_values(before), _values(after))}
            elif before["categories"]:
                yield {**title, "categories": _categories(before["categories"], after["categories"])}


def _map(points: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Positions from 0 to `MAP_SIZE`; clusters that are next to each other in order have different tones."""
    if not points:
        return []
    lows, highs = ([end(point[axis] for point in points) for axis in (1, 2)] for end in (min, max))
    spans = [max(high - low, 1e-9) for low, high in zip(lows, highs, strict=True)]
    tones = {cluster: number % NUM_TONES for number, cluster in enumerate(sorted({point[3] for point in points}))}
    return [
        {
            "x": round(MAP_SIZE * (x - lows[0]) / spans[0], 1),
            "y": round(MAP_SIZE * (y - lows[1]) / spans[1] / 2, 1),
            "cluster": cluster,
            "tone": tones[cluster],
        }
        for _, x, y, cluster in points
    ]


def _values(entry: dict[str, Any]) -> list[tuple[float, int]]:
    return sorted((float(value), count) for value, count in entry["numbers"].items())


def _categories(before: dict[str, int], after: dict[str, int]) -> list[dict[str, Any]]:
    most = max(before.values())
    rows = _largest(before)
    shown = [(name, count, after.get(name, 0)) for name, count in rows[:MAX_CATEGORIES]]
    if len(rows) > MAX_CATEGORIES:
        rest = [name for name, _ in rows[MAX_CATEGORIES:]]
        shown.append(("others", sum(before[name] for name in rest), sum(after.get(name, 0) for name in rest)))
        most = max(most, shown[-1][1])
    return [
        {"name": name, "before": first, "after": second, "width": 100 * first / most, "kept": 100 * second / most}
        for name, first, second in shown
    ]


def _binned(before: Sequence[tuple[float, int]], after: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """Heights of both histograms from 0 to 1 between common edges; the highest and lowest percent are in the end bins."""
    low, high = _percentile(before, 0.01), _percentile(before, 0.99)
    is_log = low > 0 and high / low > _LOG_RATIO
    if high <= low:
        low, high = low - 0.5, high + 0.5
    scale = math.log if is_log else float
    edges = [scale(low) + (scale(high) - scale(low)) * i / NUM_BINS for i in range(1, NUM_BINS)]
    bins = []
    for values in (before, after):
        counts = [0] * NUM_BINS
        for value, count in values:
            counts[bisect.bisect_right(edges, scale(max(value, low)))] += count
        bins.append(counts)
    most = max(*bins[0], *bins[1], 1)
    return {
        "bars": [
            (i, round(first / most, 4), round(second / most, 4))
            for i, (first, second) in enumerate(zip(*bins, strict=True))
        ],
        "low": f"{low:.4g}",
        "high": f"{high:.4g}",
        "is_log": is_log,
        "num_before": sum(count for _, count in before),
        "num_after": sum(count for _, count in after),
        "median_before": f"{_percentile(before, 0.5):.4g}",
        "median_after": f"{_percentile(after, 0.5):.4g}" if after else "-",
    }


def _percentile(values: Sequence[tuple[float, int]], share: float) -> float:
    left = share * sum(count for _, count in values)
    for value, count in values:
        left -= count
        if left <= 0:
            return value
    return values[-1][0]
