# SPDX-License-Identifier: Apache-2.0
"""Compare the merged model with its parents over the seeds of the study: means, confidence intervals, sentences.

Comes after study.py, before study_report.py. The unit of every interval is a seed: the difference is computed within each
seed, and its mean has a Student t interval over the seeds.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mindvl_cli.demo.study import IMAGE_TASKS, TEST_TASKS, ModelScores, SeedScores

_T_97_5 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # quantiles for 1 to 9 degrees of freedom

Measure = Callable[[ModelScores], float]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Mean over seeds with its 95 % confidence interval; one seed has an infinite one."""

    mean: float
    half_width: float

    @property
    def low(self) -> float:
        """Lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + self.half_width

    @property
    def verdict(self) -> str:
        """Whether the interval excludes zero."""
        return "higher" if self.low > 0 else "lower" if self.high < 0 else "not measurably different"

    def __str__(self) -> str:
        """In percent or percentage points."""
        return f"{100 * self.mean:.1f} +- {100 * self.half_width:.1f}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The merged model minus its parents, by one measure."""

    measure: str
    merged: Estimate
    best_parent: Estimate  # difference to the best of the parents by this measure, which favours the parents
    mean_parent: Estimate  # difference to their mean


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and Student t interval of one value for each seed."""
    if len(values) < 2:
        return Estimate(mean=values[0], half_width=math.inf)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean=statistics.fmean(values), half_width=_T_97_5[len(values) - 2] * error)


def landscape(model: ModelScores, tasks: Sequence[str] = IMAGE_TASKS) -> list[float]:
    """Scores of all cells: the mean over the tasks."""
    return [statistics.fmean(cell.by_task[task] for task in tasks) for cell in model.cells]


def comparisons(seeds: Sequence[SeedScores]) -> list[Comparison]:
    """All comparisons: Table 6 by task and overall, then the statistics of Figure 4 over the resolution landscape."""
    found = [_compare("test, overall", seeds, lambda model: model.overall)]
    found += [_compare(f"test, {task}", seeds, _on(task)) for task in TEST_TASKS]
    measures: tuple[tuple[str, Callable[[list[float]], float], bool], ...] = (
        ("highest", max, False),
        ("median", statistics.median, False),
        ("lowest", min, False),
        ("highest - lowest", lambda scores: max(scores) - min(scores), True),
        ("standard deviation", statistics.pstdev, True),
    )
    for name, statistic, is_spread in measures:
        found.append(_compare(f"landscape, {name}", seeds, _over(statistic), is_spread=is_spread))
    return found


def findings(seeds: Sequence[SeedScores]) -> list[str]:
    """The answers to both questions, whether they favour averaging or not."""
    by_name = {one.measure: one for one in comparisons(seeds)}
    wins = sum(one.merged.overall > max(parent.overall for parent in one.parents) for one in seeds)
    overall = by_name["test, overall"]
    spread, deviation = by_name["landscape, highest - lowest"], by_name["landscape, standard deviation"]
    median, lowest = by_name["landscape, median"], by_name["landscape, lowest"]
    return [
        f"Table 6: over {len(seeds)} seeds the merged model scores {overall.merged} % overall on the test split. It differs "
        f"from the best parent of each seed by {overall.best_parent} points ({overall.best_parent.verdict}; higher in {wins} of "
        f"{len(seeds)} seeds) and from the mean of the parents by {overall.mean_parent} points ({overall.mean_parent.verdict}).",
        f"Figure 4, level: over all pairs of limits the median of the merged model differs from the best parent by "
        f"{median.best_parent} points ({median.best_parent.verdict}), the lowest score by {lowest.best_parent} points "
        f"({lowest.best_parent.verdict}).",
        f"Figure 4, flatness: highest minus lowest score differs from the mean of the parents by {spread.mean_parent} points "
        f"({spread.mean_parent.verdict}), from the flattest parent by {spread.best_parent} points "
        f"({spread.best_parent.verdict}); the standard deviation over the pairs differs from the mean of the parents by "
        f"{deviation.mean_parent} points ({deviation.mean_parent.verdict}). Lower is flatter.",
    ]


def _on(task: str) -> Measure:
    return lambda model: model.test[task]


def _over(statistic: Callable[[list[float]], float]) -> Measure:
    return lambda model: statistic(landscape(model))


def _compare(name: str, seeds: Sequence[SeedScores], measure: Measure, *, is_spread: bool = False) -> Comparison:
    best = min if is_spread else max
    merged = [measure(one.merged) for one in seeds]
    parents = [[measure(parent) for parent in one.parents] for one in seeds]
    return Comparison(
        measure=name,
        merged=estimate(merged),
        best_parent=estimate([value - best(others) for value, others in zip(merged, parents, strict=True)]),
        mean_parent=estimate([value - statistics.fmean(others) for value, others in zip(merged, parents, strict=True)]),
    )
