# SPDX-License-Identifier: Apache-2.0
"""Names of metrics and benchmarks, and `score`, which applies one to one item.

docs/reference/evaluation-metrics.md lists every rule; tests compare that page with this registry.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindvl_merge.errors import EvaluationError
from mindvl_merge.evaluation.metrics import choices, exam, judged, mathematics, text, vqa, yes_no
from mindvl_merge.evaluation.metrics.options import as_text, read_compat, read_references

# Options that a metric may use or ignore, because they are fields of an item or settings of a metric.
OPTIONS = frozenset(
    {
        "answer_option", "answer_type", "category", "choices", "cot", "dataset", "hint", "ignore_case", "ignore_numbers",
        "ignore_punctuation", "instruction_id_list", "judge", "judgement", "kwargs", "l2_category", "level",
        "max_relative_change", "mode", "precision", "prompt", "question", "question_type", "regexes_to_ignore", "split",
        "threshold", "unit",
    }
)  # fmt: skip

# The same options under the names that the projects and the data sets use.
OTHER_NAMES = {
    "anls_threshold": "threshold",
    "dataset_name": "dataset",
    "options": "choices",
    "thresh_hold": "threshold",
}


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A rule for one item, and the names it answers to."""

    name: str
    apply: Callable[..., float]
    aliases: tuple[str, ...] = ()
    needs_references: bool = True
    has_lists: bool = False  # the text of a list is several references
    needs_judge: bool = False


METRICS = {
    metric.name: metric
    for metric in (
        Metric(
            name="anls",
            apply=text.anls,
            has_lists=True,
            aliases=("docvqa", "infovqa", "infographicvqa", "infographicsvqa", "stvqa", "mpdocvqa"),
        ),
        Metric(
            name="relaxed_accuracy",
            apply=text.relaxed_accuracy,
            has_lists=True,
            aliases=("chartqa", "relaxed", "relaxed_correctness", "relaxed_overall", "relaxed_acc"),
        ),
        Metric(name="exact_match", apply=text.exact_match, has_lists=True, aliases=("exact", "em", "accuracy", "acc", "ocrvqa")),
        Metric(name="gqa", apply=text.gqa, has_lists=True),
        Metric(name="ocrbench", apply=text.ocrbench, has_lists=True, aliases=("ocrbench_accuracy",)),
        Metric(name="vqa_accuracy", apply=vqa.vqa_accuracy, has_lists=True, aliases=("vqa", "vqa_score", "vqav2", "vqa_acc")),
        Metric(name="textvqa", apply=vqa.textvqa, has_lists=True, aliases=("vizwiz", "vizwiz_vqa", "okvqa")),
        Metric(
            name="yes_no", apply=yes_no.yes_no, aliases=("mme", "yorn", "yn", "yes_or_no", "amber", "mme_accuracy")
        ),
        Metric(name="pope", apply=yes_no.pope),
        Metric(name="hallusionbench", apply=yes_no.hallusionbench, aliases=("hallusion", "hallusion_bench_image")),
        Metric(
            name="multiple_choice",
            apply=choices.multiple_choice,
            aliases=(
                "mcq", "multi_choice", "choice", "ceval", "c_eval", "cmmlu", "mmstar", "realworldqa", "scienceqa", "seedbench",
                "blink", "mcq_vanilla",
            ),
        ),
        Metric(name="mmbench", apply=choices.mmbench, aliases=("ccbench", "mmb")),
        Metric(name="ai2d", apply=choices.ai2d),
        Metric(name="mmmu_pro", apply=choices.mmmu, aliases=("mmmu",)),
        Metric(name="mathvista", apply=mathematics.mathvista, aliases=("math_vista",)),
        Metric(name="mathvision", apply=mathematics.mathvision, aliases=("math_vision", "mathv", "math_v")),
        Metric(name="aime", apply=exam.aime, aliases=("aime24", "aime25", "aime2024", "aime2025")),
        Metric(name="gpqa", apply=exam.gpqa, aliases=("gpqa_d", "gpqa_diamond")),
        Metric(name="ifeval", apply=exam.ifeval, needs_references=False),
        Metric(name="mmvet", apply=judged.mmvet, aliases=("mm_vet",), needs_judge=True),
        Metric(
            name="simpleqa", apply=judged.simpleqa, aliases=("c_simpleqa", "chinese_simpleqa"), needs_judge=True
        ),
        Metric(name="arena_hard", apply=judged.arena_hard, needs_judge=True),
    )
}  # fmt: skip

# Endings of the names of files and splits that do not change the rule.
_ENDINGS = re.compile(
    r"(?:val|valid|validation|test|testmini|testcore|mini|dev|devval|lite|en|cn|zh|v11|10c|vision|standard|cot|core|overall)$"
)


def score(metric: str, prediction: Any, references: Any, compat: str = "vlmevalkit", **options: Any) -> float:
    """Score one answer.

    Args:
        metric: Name of a metric or a benchmark, in any spelling: `anls`, `DocVQA`, `docvqa_val`.
        prediction: Answer of the model.
        references: Expected text, or a list of accepted texts.
        compat: `vlmevalkit`, `lmms-eval`, or `strict` (without the defects of both).
        options: Fields of the item and settings of the metric; see docs/reference/evaluation-metrics.md.

    Returns:
        0.0 to 1.0.

    Raises:
        EvaluationError: Metric, compat or an option is unknown, or an argument is not valid.
    """
    rule = find_metric(metric)
    options = {OTHER_NAMES.get(name, name): value for name, value in options.items()}
    unknown = sorted(options.keys() - OPTIONS)
    if unknown:
        raise EvaluationError(
            f"{metric}: option {unknown[0]!r} is unknown. Known options: {', '.join(sorted(OPTIONS))}."
        )
    texts = read_references(references, has_lists=rule.has_lists) if rule.needs_references else []
    given = {name: value for name, value in options.items() if value is not None}
    return rule.apply(as_text(prediction), texts, read_compat(compat), **given)


def find_metric(name: str) -> Metric:
    """The metric of a name or an alias, in any spelling and with the name of a split.

    Raises:
        EvaluationError: There is none; the message lists all names.
    """
    key = _key(str(name))
    while key not in _BY_KEY:
        shorter = _ENDINGS.sub("", key)
        if shorter == key:
            known = "; ".join(", ".join((metric.name, *metric.aliases)) for metric in METRICS.values())
            raise EvaluationError(f"metric: {name!r} is unknown. Known names: {known}.")
        key = shorter
    return _BY_KEY[key]


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_BY_KEY = {_key(name): metric for metric in METRICS.values() for name in (metric.name, *metric.aliases)}
