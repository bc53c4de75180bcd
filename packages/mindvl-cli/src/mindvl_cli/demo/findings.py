# SPDX-License-Identifier: Apache-2.0
"""Summarize the results of a demo run in sentences, whether they favour the method or not.

Used by report.py. A difference counts only if it is larger than two standard errors; the models answer the same items,
so treating them as independent overstates the error and is conservative.
"""

import math
import statistics

from mindvl_cli.demo.results import GridScores, Results, ScoreTable, TableRow


def findings(results: Results) -> list[str]:
    """The sentences at the top of the report, in the order of importance."""
    sentences = [_headline(results), _merge(results.table)]
    sentences += [_robustness(results), _chosen(results)]
    return [sentence for sentence in sentences if sentence]


def percent(share: float) -> str:
    """A share with one decimal, as in "93.4%"."""
    return f"{100 * share:.1f}%"


def clock(seconds: float) -> str:
    """Format seconds as "48 s", "3 min 20 s", "1 h 5 min"."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def _headline(results: Results) -> str:
    headline = results.headline
    error = 1.96 * math.sqrt(headline.score * (1 - headline.score) / max(headline.num_items, 1))
    result = (
        f"{headline.title}: {percent(headline.score)} of {headline.num_items} "
        f"(95% interval about +-{100 * error:.1f} points; these numbers are on one line, those of the reading task in "
        "every layout)"
    )
    if results.is_quick:
        return f"{result}. The score of a quick run is not meaningful."
    if headline.score >= headline.wanted:
        return f"{result}. The documented score is {percent(headline.wanted)}, which this run reaches."
    short = _points(headline.wanted - headline.score)
    return f"{result}. The documented score is {percent(headline.wanted)}, which this run misses by {short}."


def _merge(table: ScoreTable) -> str:
    merged = next((row for row in table.rows if row.role == "merged"), None)
    parents = [row for row in table.rows if row.role == "parent"]
    if merged is None or not parents:
        return ""
    best = max(parents, key=lambda row: row.overall)
    mean = sum(row.overall for row in parents) / len(parents)
    gain = merged.overall - best.overall
    noise = 2 * math.hypot(_standard_error(merged, table), _standard_error(best, table))
    beaten = sum(merged.overall > row.overall for row in parents)
    result = (
        f"Averaging the {len(parents)} SFT models gives {percent(merged.overall)} overall; the best of them, "
        f"{best.model}, has {percent(best.overall)}, their mean is {percent(mean)}. "
        f"The average is ahead of {beaten} of {len(parents)}"
    )
    if abs(gain) <= noise:
        return (
            f"{result}, but {_points(abs(gain))} {'over' if gain >= 0 else 'under'} the best is less than sampling can "
            f"explain (+-{100 * noise:.1f} points): here merging does not differ measurably from the best single run."
        )
    side, verdict = (
        ("over", "merging beat its parents, as in the paper")
        if gain > 0
        else ("under", "merging lost here, unlike in the paper")
    )
    return f"{result}, and {_points(abs(gain))} {side} the best is more than sampling can explain: {verdict}."


def _robustness(results: Results) -> str:
    merged = next((model for model in results.search.models if model.role == "merged"), None)
    parents = [model for model in results.search.models if model.role == "parent"]
    if merged is None or not parents:
        return ""
    lowest, median = _lowest_and_median(merged)
    best_lowest, best_median = (max(values) for values in zip(*map(_lowest_and_median, parents), strict=True))
    num_items = results.search.num_validation_items
    noises = [_noise(median, best_median, num_items), _noise(lowest, best_lowest, num_items)]
    verdict = _verdict(_compare(median - best_median, noises[0]), _compare(lowest - best_lowest, noises[1]))
    return (
        f"Over all resolution settings the merged model's median is {percent(median)} and its lowest score "
        f"{percent(lowest)}; the best parent values are {percent(best_median)} and {percent(best_lowest)} "
        f"(sampling explains +-{100 * noises[0]:.1f} and +-{_points(noises[1])}). {verdict}"
    )


def _compare(difference: float, noise: float) -> str:
    if abs(difference) <= noise:
        return "not measurably different"
    return "higher" if difference > 0 else "lower"


def _verdict(median: str, lowest: str) -> str:
    if median == lowest == "higher":
        return "Both are higher, which is what the paper's Figure 4 shows."
    both = f"Both are {median}" if median == lowest else f"The median is {median}, the lowest score {lowest}"
    if "higher" in (median, lowest):
        return f"{both}; the paper's Figure 4 shows both higher."
    return f"{both}: the gain in robustness of the paper's Figure 4 does not show here."


def _chosen(results: Results) -> str:
    search = results.search
    return (
        f"The search chose {search.chosen_min_pixels:,} to {search.chosen_max_pixels:,} pixels: "
        f"{percent(search.validation_score)} on validation, {percent(search.test_score)} on the test split, "
        "which it had not seen."
    )


def _lowest_and_median(model: GridScores) -> tuple[float, float]:
    values = [score for row in model.scores for score in row if score is not None]
    return min(values), statistics.median(values)


def _noise(first: float, second: float, num_items: int) -> float:
    """Two standard errors of the difference of two shares; a median or a minimum of a grid counts as one setting.

    All settings answer the same items, so taking the median over them hardly reduces the error.
    """
    return 2 * math.sqrt(sum(share * (1 - share) for share in (first, second)) / max(num_items, 1))


def _standard_error(row: TableRow, table: ScoreTable) -> float:
    """Standard error of the mean over tasks, each a share of independent items."""
    variances = (s * (1 - s) / max(task.num_items, 1) for s, task in zip(row.scores, table.tasks, strict=True))
    return math.sqrt(sum(variances)) / len(table.tasks)


def _points(difference: float) -> str:
    return f"{100 * difference:.1f} points"
