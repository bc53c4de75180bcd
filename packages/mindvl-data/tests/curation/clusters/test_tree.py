# SPDX-License-Identifier: Apache-2.0
"""Clusters that are too broad are divided, on points whose hierarchy is known."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mindvl_data.curation.clusters.kmeans import Points
from mindvl_data.curation.clusters.tree import ClusterTree, build_tree, measure


def _points() -> tuple[Points, np.ndarray]:
    """Three tight clusters, and three pairs of centers around a fourth place: 300 points each, in six dimensions."""
    generator = np.random.default_rng(0)
    centers = [np.eye(6)[axis] * 4 for axis in range(3)]
    centers += [np.eye(6)[3] * 4 + offset * np.eye(6)[4 + n % 2] for n, offset in enumerate((0.8, 0.8, -0.8))]
    labels = generator.permutation(np.repeat(np.arange(6), 300))
    return (np.array(centers)[labels] + 0.05 * generator.normal(size=(1800, 6))).astype("f4"), labels


def _stream(points: Points) -> Iterator[Points]:
    return (points[start : start + 128] for start in range(0, len(points), 128))


def test_only_the_broad_cluster_is_divided_into_its_parts() -> None:
    points, labels = _points()
    tree = build_tree(lambda: _stream(points), 4, seed=1, broad=3.0, max_depth=2, min_size=100)
    broad = tree.names[tree.parents[-1]]
    assert sorted(tree.names[:4]) == ["0", "1", "2", "3"]
    assert all(name.startswith(f"{broad}.") for name in tree.names[4:])
    found, _ = tree.assign(points)
    for leaf in tree.leaves():
        assert len(set(labels[found == leaf].tolist())) <= 1
    assert {int(label) for label in labels[np.isin(found, range(4, len(tree.names)))]} == {3, 4, 5}


def test_sizes_and_variances_are_those_of_the_points() -> None:
    points, _ = _points()
    tree = build_tree(lambda: _stream(points), 4, seed=1, broad=1e9, max_depth=3, min_size=10)
    assert tree.parents == [-1] * 4
    sizes = measure(tree, lambda: _stream(points))
    distances = ((points[:, None] - tree.centroids[None]) ** 2).sum(axis=2)
    for node in range(4):
        members = distances[distances.argmin(axis=1) == node, node]
        assert sizes.counts[node] == len(members)
        assert abs(sizes.variances[node] - members.mean()) < 1e-4


def test_a_small_cluster_is_not_divided() -> None:
    points, _ = _points()
    tree = build_tree(lambda: _stream(points), 4, seed=1, broad=3.0, max_depth=2, min_size=600)
    assert len(tree.names) == 4


def test_a_stored_tree_assigns_points_as_before(tmp_path: Path) -> None:
    points, _ = _points()
    tree = build_tree(lambda: _stream(points), 4, seed=1, broad=3.0, max_depth=3, min_size=100)
    tree.save(tmp_path / "clusters.npz")
    again = ClusterTree.load(tmp_path / "clusters.npz")
    assert (again.names, again.parents) == (tree.names, tree.parents)
    assert np.array_equal(again.assign(points)[0], tree.assign(points)[0])


def test_rare_clusters_that_share_a_centroid_are_separated_on_the_second_level() -> None:
    generator = np.random.default_rng(5)
    labels = generator.permutation(np.repeat(np.arange(6), [2000, 2000, 1000, 500, 30, 15]))
    points = (np.eye(6)[labels] + 0.05 * generator.normal(size=(len(labels), 6))).astype("f4")
    for seed in range(5):
        tree = build_tree(lambda: _stream(points), 5, seed=seed, broad=2.0, max_depth=3, min_size=10)
        found, _ = tree.assign(points)
        assert all(len(set(labels[found == leaf].tolist())) == 1 for leaf in np.unique(found))
