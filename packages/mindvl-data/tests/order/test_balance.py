# SPDX-License-Identifier: Apache-2.0
"""Balance window: every pack once, equal loads at each moment, equal sums over a step, for several numbers of ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mindvl_data.order.balance import balance_order


def waits(steps: NDArray[np.int64], dp_size: int) -> tuple[float, float]:
    """(rank, lock-step) imbalance of [num_steps, global_batch_size] loads, packs assigned one by one to `dp_size` ranks."""
    rank, lock_step = [], []
    for step in steps.tolist():
        sums = [sum(step[number::dp_size]) for number in range(dp_size)]
        rank.append(max(sums) / (sum(sums) / dp_size) - 1)
        moments = [step[start : start + dp_size] for start in range(0, len(step), dp_size)]
        lock_step.append(sum(map(max, moments)) * dp_size / sum(step) - 1)
    return float(np.mean(rank)), float(np.mean(lock_step))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 24), st.integers(1, 12))
def test_every_pack_is_used_once(data: st.DataObject, num_steps: int, global_batch_size: int, width: int) -> None:
    count = num_steps * global_batch_size
    loads = np.array(data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count)), np.int64)
    order = balance_order(loads, global_batch_size=global_batch_size, width=width)
    assert sorted(order.tolist()) == list(range(count))


def test_two_steps_of_four_packs_by_hand() -> None:
    loads = np.array([1, 8, 2, 7, 3, 6, 4, 5], np.int64)
    steps = loads[balance_order(loads, global_batch_size=4, width=2)].reshape(2, 4)
    assert steps.sum(axis=1).tolist() == [18, 18]
    for step in steps.tolist():
        pairs = [step[:2], step[2:]]
        assert all(abs(one - other) == 1 for one, other in pairs)  # neighbours in load run side by side
        assert sum(step[::2]) == sum(step[1::2]) == 9


@pytest.mark.parametrize(("dp_size", "rank_limit", "lock_limit"), [(2, 0.002, 0.01), (4, 0.005, 0.02), (8, 0.01, 0.03)])
def test_one_recipe_serves_any_number_of_ranks_that_divides_its_width(
    dp_size: int, rank_limit: float, lock_limit: float
) -> None:
    loads = np.random.default_rng(0).normal(10_000, 1_500, 8 * 256).clip(0).astype(np.int64)
    windows = [loads[start : start + 256] for start in range(0, len(loads), 256)]
    plain = waits(loads.reshape(-1, 64), dp_size)
    order = np.concatenate([window[balance_order(window, global_batch_size=64, width=8)] for window in windows])
    rank, lock_step = waits(order.reshape(-1, 64), dp_size)
    assert rank < rank_limit < plain[0]
    assert lock_step < lock_limit < plain[1]


def test_twice_as_many_ranks_as_the_width_still_gain() -> None:
    loads = np.random.default_rng(1).normal(10_000, 1_500, 256).astype(np.int64)
    balanced = waits(loads[balance_order(loads, global_batch_size=64, width=8)].reshape(4, 64), 16)
    assert all(now < before / 2 for now, before in zip(balanced, waits(loads.reshape(4, 64), 16), strict=True))


def test_steps_of_a_window_carry_nearly_the_same_load() -> None:
    loads = np.random.default_rng(2).integers(0, 10_000, 256)
    sums = loads[balance_order(loads, global_batch_size=64, width=8)].reshape(4, 64).sum(axis=1)
    assert sums.max() / sums.mean() < 1.02


def test_a_width_that_does_not_divide_a_step_is_lowered_to_one_that_does() -> None:
    loads = np.arange(24, dtype=np.int64)
    assert (
        balance_order(loads, global_batch_size=12, width=8) == balance_order(loads, global_batch_size=12, width=6)
    ).all()
