# SPDX-License-Identifier: Apache-2.0
"""Tests of the sentences of the report: they follow the figures, also against the method."""

from dataclasses import replace

from mindvl_cli.demo.findings import clock, findings, percent
from mindvl_cli.demo.results import GridScores, Results, ScoreTable, TableRow


def _with_merged_scores(results: Results, scores: tuple[float, ...]) -> Results:
    parents = tuple(row for row in results.table.rows if row.role == "parent")
    rows = (*parents, TableRow(model="Merged", role="merged", scores=scores))
    return replace(results, table=ScoreTable(tasks=results.table.tasks, rows=rows))


def test_a_gain_within_sampling_error_is_not_called_a_gain(results: Results) -> None:
    merge = findings(_with_merged_scores(results, (0.93, 0.97, 0.92, 0.82, 0.93)))[1]

    assert "does not differ measurably" in merge


def test_a_large_gain_is_called_a_gain(results: Results) -> None:
    merge = findings(_with_merged_scores(results, (0.999, 0.999, 0.999, 0.999, 0.999)))[1]

    assert "merging beat its parents" in merge


def test_a_large_loss_is_called_a_loss(results: Results) -> None:
    merge = findings(_with_merged_scores(results, (0.5, 0.5, 0.5, 0.5, 0.5)))[1]

    assert "merging lost here" in merge
    assert "ahead of 0 of 3" in merge


def test_a_missed_promise_is_reported_with_its_size(results: Results) -> None:
    headline = findings(replace(results, headline=replace(results.headline, score=0.85)))[0]

    assert "misses by 5.0 points" in headline


def test_a_quick_run_compares_nothing_with_the_promise(results: Results) -> None:
    headline = findings(replace(results, is_quick=True))[0]

    assert "90.0%" not in headline


def _robustness_with(results: Results, grid: tuple[tuple[float | None, ...], ...], num_items: int) -> str:
    merged = GridScores(model="Merged", role="merged", scores=grid)
    parents = tuple(model for model in results.search.models if model.role == "parent")
    search = replace(results.search, models=(*parents, merged), num_validation_items=num_items)
    return findings(replace(results, search=search))[2]


def test_a_more_robust_model_is_called_so_only_above_the_sampling_error(results: Results) -> None:
    grid = ((0.91,) * 6,) * 4  # the best parent has a median of 0.884 and a lowest score of 0.836

    assert "Both are higher" in _robustness_with(results, grid, 10_000)
    assert "The median is not measurably different, the lowest score higher" in _robustness_with(results, grid, 300)
    assert "Both are not measurably different" in _robustness_with(results, grid, 30)


def test_a_less_robust_model_is_called_so(results: Results) -> None:
    assert "Both are lower: the gain in robustness" in _robustness_with(results, ((0.5,) * 6,) * 4, 300)


def test_the_headline_says_that_its_numbers_stand_in_one_line(results: Results) -> None:
    assert "on one line" in findings(results)[0]


def test_shares_and_seconds_read_as_people_write_them() -> None:
    assert percent(0.9344) == "93.4%"
    assert [clock(s) for s in (47.6, 60, 200, 3900)] == ["48 s", "1 min", "3 min 20 s", "1 h 5 min"]
