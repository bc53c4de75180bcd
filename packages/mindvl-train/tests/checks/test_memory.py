# SPDX-License-Identifier: Apache-2.0
"""Rehearsed beside measured peaks; `mindvl check memory` compares all jobs."""

from dataclasses import replace

import pytest

from mindvl_train.checks.memory import CASES, compare_memory


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3, one process", pytest.param("Qwen3-MoE, ep 2 dp 2", marks=pytest.mark.multi)])
def test_the_rehearsed_peak_of_every_rank_is_the_measured_one_within_a_percent(name):
    (case,) = (case for case in CASES if case.name == name)
    rows = list(compare_memory((case,)))
    assert [row.rank for row in rows] == list(range(case.processes))
    for row in rows:
        assert row.rehearsed == pytest.approx(row.measured, rel=0.01)


@pytest.mark.slow
@pytest.mark.multi
def test_padding_rows_of_expert_messages_are_rehearsed_and_estimated():
    (case,) = (case for case in CASES if case.name == "Qwen3-MoE, ep 2 dp 2")
    case = replace(case, parallel=replace(case.parallel, expert_capacity_factor=1.5))
    for row in compare_memory((case,)):
        assert row.rehearsed == pytest.approx(row.measured, rel=0.01)
        assert row.estimated == pytest.approx(row.rehearsed, rel=0.03)


def test_the_jobs_have_sixteen_ranks_and_every_kind_of_layout():
    assert sum(case.processes for case in CASES) == 16
    for name in ("tp_size", "pp_size", "cp_size", "ep_size"):
        assert any(getattr(case.parallel, name) > 1 for case in CASES)
