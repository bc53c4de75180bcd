# SPDX-License-Identifier: Apache-2.0
"""k-means on points with known clusters, and its parts against slower methods."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindvl_data.curation.clusters.kmeans import Points, batches, fit, fit_in_memory, nearest, sample_points

QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # processors of CI are shared


def _blobs(seed: int, sizes: list[int], spread: float = 0.05) -> tuple[Points, np.ndarray]:
    """Clusters on the axes of a space, far from each other, in random order; also the cluster of each point."""
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.repeat(np.arange(len(sizes)), sizes))
    return (np.eye(len(sizes))[labels] + spread * generator.normal(size=(len(labels), len(sizes)))).astype("f4"), labels


def _blocks(points: Points, rows: int) -> Iterator[Points]:
    return (points[start : start + rows] for start in range(0, len(points), rows))


def test_the_nearest_centroid_is_that_of_all_distances() -> None:
    generator = np.random.default_rng(1)
    points, centroids = generator.normal(size=(50, 8)).astype("f4"), generator.normal(size=(9, 8)).astype("f4")
    distances = ((points[:, None] - centroids[None]) ** 2).sum(axis=2)
    found, squared = nearest(points, centroids, 2)
    assert np.array_equal(found, np.argsort(distances, axis=1)[:, :2])
    assert np.allclose(squared, np.sort(distances, axis=1)[:, :2], atol=1e-4)


def test_far_clusters_are_separated_whatever_their_size() -> None:
    points, labels = _blobs(2, [3000, 500, 40, 8])
    found = nearest(points, fit(lambda: _blocks(points, 100), 8, seed=0))[0][:, 0]
    for cluster in np.unique(found):
        assert len(set(labels[found == cluster].tolist())) == 1


def test_the_result_does_not_depend_on_the_blocks_of_the_stream() -> None:
    points, _ = _blobs(3, [700, 300, 100], spread=0.5)
    first = fit(lambda: _blocks(points, 11), 5, seed=1)
    assert np.array_equal(first, fit(lambda: _blocks(points, 1000), 5, seed=1))
    assert not np.array_equal(first, fit(lambda: _blocks(points, 1000), 5, seed=2))


def test_fewer_distinct_points_than_clusters_give_fewer_centroids() -> None:
    points = np.array([[1, 0], [0, 1], [1, 0]], "f4")
    assert sorted(fit_in_memory(points, 5, seed=0).tolist()) == [[0, 1], [1, 0]]


def test_centroids_of_lloyds_iterations_are_the_means_of_their_points() -> None:
    points, _ = _blobs(4, [40, 40, 40], spread=0.02)
    centroids = fit_in_memory(points, 3, seed=0)
    found = nearest(points, centroids)[0][:, 0]
    for cluster in range(3):
        assert np.allclose(centroids[cluster], points[found == cluster].mean(axis=0), atol=1e-6)


@QUIET
@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 7))
def test_batches_have_a_fixed_size_and_keep_the_order(lengths: list[int], rows: int) -> None:
    total = sum(lengths)
    points = np.arange(total, dtype="f4")[:, None]
    borders = np.cumsum([0, *lengths])
    found = list(batches((points[a:b] for a, b in zip(borders, borders[1:], strict=False)), rows))  # noqa: RUF007
    assert np.array_equal(np.concatenate([*found, points[:0]]), points)
    assert all(len(part) == rows for part in found[:-1])


@pytest.mark.parametrize("limit", [1, 20, 500])
def test_a_sample_is_a_subset_in_order_and_independent_of_blocks(limit: int) -> None:
    points = np.arange(300, dtype="f4")[:, None]
    found = sample_points(_blocks(points, 7), limit, seed=5)[:, 0]
    assert len(found) == min(limit, 300)
    assert np.all(np.diff(found) > 0)
    assert np.array_equal(found, sample_points(_blocks(points, 300), limit, seed=5)[:, 0])
