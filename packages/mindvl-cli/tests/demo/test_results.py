# SPDX-License-Identifier: Apache-2.0
"""Tests of the derived figures of the demo's results."""

from mindvl_cli.demo.results import Results, TableRow


def test_overall_is_the_mean_over_tasks_whatever_their_size() -> None:
    assert TableRow(model="A", role="parent", scores=(1.0, 0.5)).overall == 0.75


def test_the_total_time_is_the_sum_of_the_stages(results: Results) -> None:
    assert results.timing.total_s == 9 + 40 + 55 + 35 + 210 + 70 + 72 + 80 + 2 + 65
