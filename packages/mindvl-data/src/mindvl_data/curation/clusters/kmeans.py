# SPDX-License-Identifier: Apache-2.0
"""Mini-batch k-means over a stream of points.

Comes after embeddings.py, before tree.py. A sample of the points is clustered in memory (greedy k-means++, Arthur and
Vassilvitskii, 2007, then Lloyd's iterations); then one pass over all points moves the centroids by mini-batches (Sculley,
2010). Memory: the sample, 65,536 points or 256 for each centroid as faiss recommends, and one mini-batch. The batches
have a fixed size, so that the result does not depend on the blocks of the stream.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from mindvl_data.curation.duplicates.sorting import mixed
from mindvl_data.curation.extras import require

Points = NDArray[np.float32]  # [R, D]
Stream = Callable[[], Iterator[Points]]  # every call starts at the first point

POINTS_PER_CENTROID = 256
MIN_SAMPLE = 1 << 16  # points that are sampled whatever the number of clusters, so that rare ones are in the sample
BATCH_ROWS = 8192

_LLOYD_ITERATIONS = 20
_CANDIDATES = 8  # points of which the best becomes the next initial centroid


def nearest(points: Points, centroids: Points, count: int = 1) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The nearest centroids of each point [R, count], and the squared distances; exact search by faiss."""
    faiss = require("faiss", extra="curation")
    distances, found = faiss.knn(np.ascontiguousarray(points), np.ascontiguousarray(centroids), count)
    return found, np.maximum(distances, 0)


def fit(stream: Stream, num_clusters: int, seed: int) -> Points:
    """Centroids [k, D], k at most `num_clusters`, of all points of the stream."""
    sample = sample_points(stream(), max(MIN_SAMPLE, POINTS_PER_CENTROID * num_clusters), seed)
    centroids = fit_in_memory(sample, num_clusters, seed)
    counts = np.zeros(len(centroids))
    for points in batches(stream(), BATCH_ROWS):
        found = nearest(points, centroids)[0][:, 0]
        added = np.bincount(found, minlength=len(centroids))
        counts += added
        moved = np.flatnonzero(added)
        centroids[moved] += (_sums(points, found, len(centroids))[moved] - added[moved, None] * centroids[moved]) / (
            counts[moved, None]
        )
    return centroids


def fit_in_memory(points: Points, num_clusters: int, seed: int) -> Points:
    """Centroids [k, D] of points in memory, by k-means++ and Lloyd's iterations; a cluster without points keeps its centroid."""
    centroids = _seeds(points, num_clusters, np.random.default_rng(seed))
    for _ in range(_LLOYD_ITERATIONS if len(centroids) else 0):
        found = nearest(points, centroids)[0][:, 0]
        counts = np.bincount(found, minlength=len(centroids))
        moved = np.flatnonzero(counts)
        before = centroids.copy()
        centroids[moved] = _sums(points, found, len(centroids))[moved] / counts[moved, None]
        if np.array_equal(before, centroids):
            break
    return centroids


class Sample:
    """At most `limit` points of a stream, chosen by a hash of their position; holds twice as many at most while it grows."""

    def __init__(self, limit: int, seed: int) -> None:
        self._limit, self._seed = limit, seed
        self._hashes: list[NDArray[np.uint64]] = []
        self._positions: list[NDArray[np.int64]] = []
        self._points: list[Points] = []
        self._count = 0

    def add(self, positions: NDArray[np.int64], points: Points) -> None:
        """Add points with their positions in the stream, ascending."""
        self._hashes.append(mixed(mixed(positions) ^ np.uint64(self._seed % (1 << 64))))
        self._positions.append(positions)
        self._points.append(points)
        self._count += len(points)
        if self._count > 2 * self._limit:
            self._reduce()

    def points(self) -> Points:
        """The points in the order of the stream."""
        self._reduce()
        return self._points[0]

    def _reduce(self) -> None:
        hashes = np.concatenate(self._hashes or [np.empty(0, np.uint64)])
        chosen = np.sort(np.argsort(hashes, kind="stable")[: self._limit])
        positions = np.concatenate(self._positions or [np.empty(0, np.int64)])
        points = np.concatenate(self._points or [np.empty((0, 0), np.float32)])
        self._hashes, self._positions, self._points = [hashes[chosen]], [positions[chosen]], [points[chosen]]
        self._count = len(chosen)


def sample_points(blocks: Iterable[Points], limit: int, seed: int) -> Points:
    """At most `limit` points, in the order of the stream."""
    sample, start = Sample(limit, seed), 0
    for points in blocks:
        sample.add(np.arange(start, start + len(points)), points)
        start += len(points)
    return sample.points()


def batches(blocks: Iterable[Points], rows: int) -> Iterator[Points]:
    """The same points in blocks of `rows`, the last one smaller."""
    kept: list[Points] = []
    num_kept = 0
    for points in blocks:
        kept.append(points)
        num_kept += len(points)
        if num_kept >= rows:
            joined = np.concatenate(kept)
            for start in range(0, num_kept - rows + 1, rows):
                yield joined[start : start + rows]
            kept = [joined[num_kept - num_kept % rows :]]
            num_kept %= rows
    if num_kept:
        yield np.concatenate(kept)


def _seeds(points: Points, num_clusters: int, generator: np.random.Generator) -> Points:
    """Greedy k-means++: of several points drawn in proportion to their squared distance from the nearest centroid, the
    next one is that which lowers the sum of squared distances most, so that small distant clusters are seldom missed."""
    if not len(points):
        return points
    chosen = [int(generator.integers(len(points)))]
    distances = _squared_distances(points, points[chosen[0]])
    norms = np.einsum("rd,rd->r", points, points)
    while len(chosen) < num_clusters:
        total = np.cumsum(distances, dtype=np.float64)
        if total[-1] <= 0:  # fewer distinct points than clusters
            break
        drawn = np.searchsorted(total, generator.random(_CANDIDATES) * total[-1], side="right")
        drawn = np.unique(np.minimum(drawn, len(points) - 1))
        to_drawn = np.maximum(norms[:, None] + norms[drawn] - 2 * (points @ points[drawn].T), 0)
        left = np.minimum(distances[:, None], to_drawn).sum(axis=0, dtype=np.float64)
        chosen.append(int(drawn[left.argmin()]))
        np.minimum(distances, _squared_distances(points, points[chosen[-1]]), out=distances)
    return points[chosen].copy()


def _squared_distances(points: Points, center: NDArray[np.float32]) -> NDArray[np.float32]:
    difference = points - center
    return np.einsum("rd,rd->r", difference, difference)


def _sums(points: Points, found: NDArray[np.int64], num_clusters: int) -> NDArray[np.float64]:
    """The sum of the points of each cluster [k, D]."""
    order = np.argsort(found, kind="stable")
    clusters, starts = np.unique(found[order], return_index=True)
    sums = np.zeros((num_clusters, points.shape[1]))
    sums[clusters] = np.add.reduceat(points[order].astype(np.float64), starts, axis=0)
    return sums
