# SPDX-License-Identifier: Apache-2.0
"""Tests of the comparison over seeds, with values computed by hand."""

import math

import pytest

from mindvl_cli.demo.study import IMAGE_TASKS, TEST_TASKS, Cell, ModelScores, SeedScores
from mindvl_cli.demo.study_findings import comparisons, estimate, findings


def _model(name: str, test: float, cells: tuple[float, ...]) -> ModelScores:
    return ModelScores(
        model=name,
        test=dict.fromkeys(TEST_TASKS, test),
        chosen=(784, 7840),
        cells=tuple(
            Cell(min_pixels=784, max_pixels=1568 * number, by_task=dict.fromkeys(IMAGE_TASKS, score))
            for number, score in enumerate(cells, start=1)
        ),
    )


def _seeds(*merged: float) -> tuple[SeedScores, ...]:
    """Parents score 0.5 and 0.6 in every seed, the merged model the given values."""
    parents = (_model("sft-256", 0.5, (0.2, 0.4, 0.6)), _model("sft-512", 0.6, (0.3, 0.5, 0.6)))
    return tuple(
        SeedScores(seed=number, parents=parents, merged=_model("merged", score, (0.5, 0.5, 0.6)))
        for number, score in enumerate(merged, start=1)
    )


def test_the_interval_is_that_of_student_for_five_values() -> None:
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    # standard deviation sqrt(2.5), standard error sqrt(0.5), t quantile of 4 degrees of freedom 2.776
    assert (found.mean, found.half_width) == (3.0, pytest.approx(2.776 * math.sqrt(0.5)))
    assert found.verdict == "higher"


def test_one_seed_shows_nothing() -> None:
    assert estimate([0.3]).verdict == "not measurably different"


def test_the_best_parent_is_that_of_each_measure() -> None:
    by_name = {one.measure: one for one in comparisons(_seeds(0.7, 0.7))}
    assert by_name["test, overall"].best_parent.mean == pytest.approx(0.1)
    assert by_name["test, overall"].mean_parent.mean == pytest.approx(0.15)
    assert by_name["landscape, lowest"].best_parent.mean == pytest.approx(0.2)
    # spreads are 0.4 and 0.3 for the parents, 0.1 for the merged model
    spread = by_name["landscape, highest - lowest"]
    assert (spread.best_parent.mean, spread.mean_parent.mean) == (pytest.approx(-0.2), pytest.approx(-0.25))


def test_a_difference_counts_only_if_its_interval_excludes_zero() -> None:
    assert "(higher; higher in 5 of 5 seeds)" in findings(_seeds(0.70, 0.71, 0.70, 0.71, 0.70))[0]
    assert "(not measurably different; higher in 3 of 5 seeds)" in findings(_seeds(0.7, 0.5, 0.7, 0.5, 0.7))[0]
    assert "(lower; higher in 0 of 5 seeds)" in findings(_seeds(0.50, 0.51, 0.50, 0.51, 0.50))[0]
