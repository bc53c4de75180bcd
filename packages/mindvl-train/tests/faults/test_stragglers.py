# SPDX-License-Identifier: Apache-2.0
"""Tests of naming slow ranks; test_watchdog.py slows a real one down."""

import pytest
import torch

from mindvl_model import set_up_device
from mindvl_train.faults.stragglers import Stragglers, slow_ranks
from mindvl_train.parallel_state import process_groups


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ([1.0, 1.0, 1.0, 1.3], [3]),
        ([1.0, 1.0, 1.0, 1.19], []),
        ([1.3, 1.0, 1.0, 0.2, 1.4], [0, 4]),
        ([2.0], []),
        ([0.0, 0.0], []),
    ],
)
def test_a_rank_is_slow_when_it_needs_a_fifth_more_than_the_median(seconds: list[float], slow: list[int]) -> None:
    assert slow_ranks(seconds) == slow


def test_one_process_is_never_slow_and_compares_once_per_window() -> None:
    with process_groups(set_up_device(), seed=0):
        stragglers = Stragglers(every_steps=2, device=torch.device("cpu"))
        for step in range(1, 13):
            stragglers.begin("data")
            stragglers.begin("compute")
            stragglers.begin("reduce")
            assert stragglers.finish_step(step) == []
