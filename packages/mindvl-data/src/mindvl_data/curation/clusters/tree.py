# SPDX-License-Identifier: Apache-2.0
"""A tree of clusters: clusters that are too broad are clustered again.

Comes after kmeans.py, before cluster.py. A cluster is too broad if its variance, the mean squared distance from its
centroid, is more than `broad` times the median variance of the clusters of the first level; it is divided into as many
clusters as the ratio, rounded up, at most 16.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mindvl_data.curation.clusters.kmeans import (
    POINTS_PER_CENTROID,
    Points,
    Sample,
    Stream,
    fit,
    fit_in_memory,
    nearest,
)
from mindvl_data.shards.atomic import AtomicFile

MAX_CHILDREN = 16

_ROOT = -1


@dataclass
class ClusterTree:
    """Centroids of all levels; records belong to leaves.

    Attributes:
        centroids: [nodes, D].
        parents: For each node, its parent, -1 on the first level; children follow their parent and each other.
        names: "7" on the first level, "7.0", "7.1" below it.
    """

    centroids: Points
    parents: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def assign(self, points: Points) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The leaf of each point [R], found level by level, and the squared distance from its centroid."""
        children = self._children()
        found, distances = _nearest_of(points, self.centroids, children[_ROOT])
        for node in range(len(self.parents)):
            if node in children:  # parents come before their children
                members = np.flatnonzero(found == node)
                found[members], distances[members] = _nearest_of(points[members], self.centroids, children[node])
        return found, distances

    def leaves(self) -> list[int]:
        """Nodes without children."""
        return [node for node in range(len(self.parents)) if node not in set(self.parents)]

    def add(self, parent: int, centroids: Points) -> None:
        """Add children to a leaf, or the first level."""
        prefix = "" if parent == _ROOT else f"{self.names[parent]}."
        self.names += [f"{prefix}{number}" for number in range(len(centroids))]
        self.parents += [parent] * len(centroids)
        self.centroids = np.concatenate([self.centroids.reshape(-1, centroids.shape[1]), centroids])

    def save(self, path: Path) -> None:
        """Write the tree; the file appears when it is complete."""
        with AtomicFile(path) as file:
            np.savez(file.file, centroids=self.centroids, parents=np.array(self.parents), names=np.array(self.names))

    @classmethod
    def load(cls, path: Path) -> "ClusterTree":
        """Read a tree that `save` wrote."""
        with np.load(path) as stored:
            return cls(stored["centroids"], stored["parents"].tolist(), stored["names"].tolist())

    def _children(self) -> dict[int, NDArray[np.int64]]:
        parents = np.array(self.parents)
        return {int(parent): np.flatnonzero(parents == parent) for parent in np.unique(parents)}


@dataclass(frozen=True)
class LeafSizes:
    """Records and variance of each node; 0 for a node that is not a leaf."""

    counts: NDArray[np.int64]
    variances: NDArray[np.float64]


def build_tree(
    stream: Stream, num_clusters: int, seed: int, *, broad: float, max_depth: int, min_size: int
) -> ClusterTree:
    """Cluster a stream of points; every level takes two passes over the points.

    Args:
        stream: The points.
        num_clusters: Clusters of the first level.
        seed: Seed of the initial centroids.
        broad: Ratio of variances from which a cluster is too broad.
        max_depth: Levels of the tree.
        min_size: Points that every cluster below the first level should have; smaller clusters are not divided.
    """
    tree = ClusterTree(np.empty(0, np.float32))
    tree.add(_ROOT, fit(stream, num_clusters, seed))
    sizes = measure(tree, stream)
    usual = float(np.median(sizes.variances[sizes.counts > 1])) if np.any(sizes.counts > 1) else 0.0
    for _ in range(max_depth - 1):
        wanted = {}
        for leaf in tree.leaves():
            limit = min(MAX_CHILDREN, int(sizes.counts[leaf]) // min_size)
            if usual and sizes.variances[leaf] > broad * usual and limit >= 2:
                wanted[leaf] = min(limit, max(2, int(np.ceil(sizes.variances[leaf] / usual))))
        if not wanted:
            break
        for leaf, points in _samples(tree, stream, wanted, seed).items():
            tree.add(leaf, fit_in_memory(points, wanted[leaf], seed))
        sizes = measure(tree, stream)
    return tree


def measure(tree: ClusterTree, stream: Stream) -> LeafSizes:
    """Count the points of each leaf, and average their squared distances."""
    counts, sums = np.zeros(len(tree.parents), np.int64), np.zeros(len(tree.parents))
    for points in stream():
        leaves, distances = tree.assign(points)
        counts += np.bincount(leaves, minlength=len(counts))
        sums += np.bincount(leaves, distances, minlength=len(counts))
    return LeafSizes(counts, sums / np.maximum(counts, 1))


def _nearest_of(
    points: Points, centroids: Points, nodes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    if not len(points):
        return np.empty(0, np.int64), np.empty(0, np.float32)
    found, distances = nearest(points, centroids[nodes])
    return nodes[found[:, 0]], distances[:, 0].copy()


def _samples(tree: ClusterTree, stream: Stream, wanted: dict[int, int], seed: int) -> dict[int, Points]:
    """A sample of the points of each leaf in `wanted`; one pass that holds all samples in memory."""
    samples = {leaf: Sample(POINTS_PER_CENTROID * count, seed) for leaf, count in wanted.items()}
    start = 0
    for points in stream():
        found = tree.assign(points)[0]
        for leaf in np.intersect1d(found, list(wanted)).tolist():
            members = np.flatnonzero(found == leaf)
            samples[leaf].add(start + members, points[members])
        start += len(points)
    return {leaf: sample.points() for leaf, sample in samples.items()}
