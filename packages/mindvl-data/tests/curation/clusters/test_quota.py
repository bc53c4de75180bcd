# SPDX-License-Identifier: Apache-2.0
"""Quotas by hand, and their rules on arbitrary clusters."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindvl_data.curation.clusters.quota import quotas

QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # processors of CI are shared


@pytest.mark.parametrize(
    ("total", "weights", "sizes", "floor", "expected"),
    [
        (10, [1, 3], [100, 100], 0, [3, 7]),  # 2.5 and 7.5: the tie goes to the earlier cluster
        (10, [1, 4], [100, 100], 0, [2, 8]),
        (12, [1, 4], [100, 100], 1, [3, 9]),  # 1 each, then 10 in shares of 2 and 8
        (10, [1, 4], [100, 5], 0, [5, 5]),  # the second has 5 only
        (20, [1, 1, 8], [100, 100, 4], 2, [8, 8, 4]),  # the rare cluster is kept whole
        (10, [0, 0], [30, 10], 0, [8, 2]),  # without variance: by size, 7.5 and 2.5
        (10, [0, 5], [30, 4], 0, [6, 4]),  # what the second does not have comes from the first
        (3, [1, 9], [100, 100], 2, [2, 1]),  # the floors alone are more than 3: 1.5 each
        (50, [1, 1], [3, 4], 10, [3, 4]),
        (0, [1, 1], [3, 4], 0, [0, 0]),
    ],
)
def test_quotas_follow_weights_floors_and_sizes(
    total: int, weights: list[float], sizes: list[int], floor: int, expected: list[int]
) -> None:
    assert quotas(total, np.array(weights, float), np.array(sizes), floor).tolist() == expected


CLUSTERS = st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), min_size=1, max_size=12)


@QUIET
@given(CLUSTERS, st.integers(0, 700), st.integers(0, 8))
def test_the_sum_is_exact_and_every_quota_is_within_its_limits(
    clusters: list[tuple[float, int]], total: int, floor: int
) -> None:
    weights, sizes = np.array([weight for weight, _ in clusters]), np.array([size for _, size in clusters])
    found = quotas(total, weights, sizes, floor)
    assert found.sum() == min(total, sizes.sum())
    assert np.all((found >= 0) & (found <= sizes))
    floors = np.minimum(sizes, floor)
    if floors.sum() <= total:
        assert np.all(found >= floors)
        for i in range(len(sizes)):
            for j in range(len(sizes)):  # more variance never gives less above the floor, up to rounding and size
                if weights[i] >= weights[j] and found[i] < sizes[i]:
                    assert found[i] - floors[i] >= found[j] - floors[j] - 1
