# SPDX-License-Identifier: Apache-2.0
"""Scores of a benchmark from the scores of its items.

Comes after registry.py. A record is the score of one item with the fields that the benchmark groups by, under the names
of VLMEvalKit's columns.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.metrics.options import Compat, read_compat, read_list
from mindvl_merge.evaluation.metrics.registry import find_metric
from mindvl_merge.evaluation.metrics.text import FORMULA_CATEGORY

Record = Mapping[str, Any]

MME_PERCEPTION = (
    "existence", "count", "position", "color", "posters", "celebrity", "scene", "landmark", "artwork", "OCR",
)  # fmt: skip
MME_COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")
MME_PARTS = 28  # 14 categories of 100 for accuracy and 100 for accuracy+
MMVET_CAPABILITIES = ("rec", "ocr", "know", "gen", "spat", "math")
OCRBENCH_RECOGNITION = (
    "Regular Text Recognition", "Irregular Text Recognition", "Artistic Text Recognition", "Handwriting Recognition",
    "Digit String Recognition", "Non-Semantic Text Recognition",
)  # fmt: skip
OCRBENCH_OTHERS = ("Scene Text-centric VQA", "Doc-oriented VQA", "Key Information Extraction", FORMULA_CATEGORY)
_RESAMPLES = 1000  # of the bootstrap
CIRCULAR_STEP = 1_000_000  # distance of the indices of the rotations of a question


def aggregate(benchmark: str, records: Sequence[Record], compat: str = "vlmevalkit") -> dict[str, float]:
    """Scores of a benchmark.

    Args:
        benchmark: Name of a benchmark or a metric.
        records: `score` of each item, and what the benchmark needs: `category`, `image` (MME), `index` and `g_index`
            (MMBench), `index` (HallusionBench), `skills` and `task` (MathVista), `split`, `l2-category`, `attempted`
            (C-SimpleQA), `weight` (Arena-Hard).

    Returns:
        `overall` from 0 to 100, and further scores by name.

    Raises:
        EvaluationError: There is no record, or one lacks a field.
    """
    if not records:
        raise EvaluationError(f"{benchmark}: there is no score to aggregate. Give at least one record.")
    rule = _AGGREGATES.get(_kind(benchmark), _mean_by_category)
    return rule(records, read_compat(compat))


def _kind(benchmark: str) -> str:
    return "mme" if re.match(r"mme(?![a-z])", benchmark.lower()) else find_metric(benchmark).name


def _mean_by_category(records: Sequence[Record], compat: Compat) -> dict[str, float]:
    result = {"overall": 100 * fmean(record["score"] for record in records)}
    for field in ("split", "l2-category", "category"):
        for name, scores in _groups(records, lambda record, field=field: record.get(field)).items():  # type: ignore[misc]
            if name is not None:
                result[str(name)] = 100 * fmean(scores)
    return result


def mme(records: Sequence[Record], compat: Compat) -> dict[str, float]:
    """Accuracy and accuracy+ (both questions of an image right) of each category, their sums, and the sum over 28."""
    result: dict[str, float] = {}
    by_category: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_category[_field(record, "category", "mme")].append(record)
    for category, members in by_category.items():
        pairs = _groups(members, lambda record: _field(record, "image", "mme"))
        for image, scores in pairs.items():
            if len(scores) != 2:
                raise EvaluationError(
                    f"mme: image {image!r} of category {category!r} has {len(scores)} questions, 2 are needed for accuracy+. "
                    "Complete the file."
                )
        accuracy = 100 * fmean(record["score"] for record in members)
        plus = 100 * fmean(first * second for first, second in pairs.values())
        result[f"{category} accuracy"], result[f"{category} accuracy+"] = accuracy, plus
        result[category] = accuracy + plus
    for name, parts in (("perception", MME_PERCEPTION), ("cognition", MME_COGNITION)):
        result[name] = sum(result.get(part, 0.0) for part in parts)
    result["score"] = result["perception"] + result["cognition"]
    return {"overall": result["score"] / MME_PARTS, **result}


def mmbench(records: Sequence[Record], compat: Compat) -> dict[str, float]:
    """Circular score: a question is right if all its rotations are; its main record has the group's own index."""
    groups: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        index = int(_field(record, "index", "mmbench"))
        groups[int(record.get("g_index", index % CIRCULAR_STEP))].append(record)
    joined = []
    for group, members in groups.items():
        main = next((record for record in members if int(record["index"]) == group), None)
        if main is None:
            raise EvaluationError(f"mmbench: question {group} has rotations but no main entry. Complete the file.")
        joined.append({**main, "score": float(all(record["score"] for record in members))})
    result = _mean_by_category(joined, compat)
    return {**result, "single": 100 * fmean(record["score"] for record in records)}


def ocrbench(records: Sequence[Record], compat: Compat) -> dict[str, float]:
    """Number of right answers by category; the overall score is a tenth of their number over the 1000 questions."""
    right: dict[str, float] = defaultdict(float)
    for record in records:
        right[_field(record, "category", "ocrbench")] += record["score"]
    result = {"Text Recognition": sum(right[name] for name in OCRBENCH_RECOGNITION)}
    result |= {name: right[name] for name in OCRBENCH_OTHERS}
    final = sum(result.values())
    share = 100 * fmean(record["score"] for record in records)
    return {"overall": share if compat == "strict" else final / 10, **result, "Final Score": final}


def hallusionbench(records: Sequence[Record], compat: Compat) -> dict[str, float]:
    """aAcc by question, fAcc by figure, qAcc by question over its figures; overall is the mean of the three."""
    parts = [_hallusion_parts(record) for record in records]

    def share(
        key: Callable[[dict[str, str]], object], keeps: Callable[[dict[str, str]], bool] = lambda _: True
    ) -> float:
        groups: dict[object, list[float]] = defaultdict(list)
        for part, record in zip(parts, records, strict=True):
            if keeps(part):
                groups[key(part)].append(record["score"])
        return 100 * fmean(float(all(scores)) for scores in groups.values()) if groups else 0.0

    def has_figure(part: dict[str, str]) -> bool:
        return compat != "lmms-eval" or part["category"] != "VS" or part["figure"] != "0"

    result = {
        "aAcc": 100 * fmean(record["score"] for record in records),
        "fAcc": share(lambda part: (part["group"], part["set"], part["figure"]), has_figure),
        "qAcc": share(lambda part: (part["group"], part["set"], part["question"])),
    }
    return {"overall": fmean(result.values()), **result}


def _hallusion_parts(record: Record) -> dict[str, str]:
    """Set, figure and question from their fields, or from an index such as `VD_chart_1_2_0_1`."""
    index = str(record.get("index", ""))
    pieces = index.split("_")
    if "set_id" in record:
        numbers = [str(record[name]) for name in ("set_id", "figure_id", "question_id")]
    elif len(pieces) > 5:
        numbers = pieces[3:6]
    else:
        raise EvaluationError(
            f"hallusionbench: index {index!r} has no set, figure and question. Give set_id, figure_id and question_id."
        )
    group = record.get("l2-category", record.get("subcategory", ""))
    category = str(record.get("category", pieces[0]))
    return {"set": numbers[0], "figure": numbers[1], "question": numbers[2], "category": category} | {
        "group": str(group) if "l2-category" in record else f"{category}_{group}"
    }


def mathvista(records: Sequence[Record], compat: Compat) -> dict[str, float]:
    """Overall, and by `task` and by each of the `skills`."""
    groups: dict[str, list[float]] = defaultdict(list)
    for record in records:
        skills = read_list(record.get("skills"))
        names = skills if skills is not None else [record["skills"]] if record.get("skills") else []
        for name in (*names, *([record["task"]] if record.get("task") else [])):
            groups[str(name)].append(record["score"])
    overall = 100 * fmean(record["score"] for record in records)
    return {"overall": overall, **{name: 100 * fmean(scores) for name, scores in groups.items()}}


def mmvet(records: Sequence[Record], compat: Compat) -> dict[str, float]:
    """Overall, and by the capabilities that an item's category names."""
    result = {"overall": 100 * fmean(record["score"] for record in records)}
    for name in MMVET_CAPABILITIES:
        scores = [record["score"] for record in records if name in str(record.get("category", ""))]
        if scores:
            result[name] = 100 * fmean(scores)
    return result


def simpleqa(records: Sequence[Record], compat: Compat) -> dict[str, float]:
    """Overall: share of correct answers; also of those that attempt an answer, and the harmonic mean of both (F-score)."""
    correct = fmean(record["score"] for record in records)
    attempted = [record for record in records if record.get("attempted", True)]
    precision = fmean(record["score"] for record in attempted) if attempted else 0.0
    shares = {
        "correct": correct,
        "incorrect": len(attempted) / len(records) - correct,
        "not attempted": 1 - len(attempted) / len(records),
        "correct given attempted": precision,
        "F-score": 2 * correct * precision / (correct + precision) if correct else 0.0,
    }
    return {**_mean_by_category(records, compat), **{name: 100 * share for name, share in shares.items()}}


def arena_hard(records: Sequence[Record], compat: Compat) -> dict[str, float]:
    """Weighted share of won games, with a 95 % interval by a bootstrap over questions.

    With one baseline, this is the win rate that a Bradley-Terry model predicts.
    """
    import numpy as np  # metrics of single items do not need it

    scores = np.array([record["score"] for record in records])
    weights = np.array([record.get("weight", 1) for record in records])
    drawn = np.random.default_rng(0).integers(0, len(records), (_RESAMPLES, len(records)))
    rates = (scores * weights)[drawn].sum(axis=1) / weights[drawn].sum(axis=1)
    low, high = np.percentile(rates, [2.5, 97.5])
    overall = (scores * weights).sum() / weights.sum()
    shares = {"overall": overall, "low": low, "high": high}
    return {name: 100 * float(share) for name, share in shares.items()}


def _groups(records: Sequence[Record], key: Callable[[Record], Any]) -> dict[Any, list[float]]:
    groups: dict[Any, list[float]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record["score"])
    return groups


def _field(record: Record, name: str, benchmark: str) -> Any:
    if record.get(name) is None:
        raise EvaluationError(f"{benchmark}: a record has no {name!r}: {dict(record)!r:.200}. Add the field.")
    return record[name]


_AGGREGATES: dict[str, Callable[[Sequence[Record], Compat], dict[str, float]]] = {
    "mme": mme,
    "mmbench": mmbench,
    "ocrbench": ocrbench,
    "hallusionbench": hallusionbench,
    "mathvista": mathvista,
    "mmvet": mmvet,
    "simpleqa": simpleqa,
    "arena_hard": arena_hard,
}
